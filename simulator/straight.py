"""The same as `play`, and much faster, for a pipeline that comes to each worker once, without jitter.

A worker goes on beyond the clocks of its neighbours as long as what it chooses does not hang on anything
that is not yet known: mostly the inputs that it looks at are known, in its own future or past. So each
visit brings it far. What has come to it by the end of each operation is not always known then: memory is
counted afterwards, and until that is done the end of an operation stands where its place in the static
order stood.
"""

from __future__ import annotations

from ..pipeline.flat import (
    AFTER,
    AHEAD,
    BACKWARD,
    BEFORE,
    COUNT,
    FORWARD,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    OTHER_ROOM,
    OWNER,
    PLACE,
    ROOM,
    TOTAL,
    Cells,
)
from ..pipeline.policy import FORWARD as FORTH
from ..pipeline.policy import MAYBE, NO, NOTHING, RECOMPUTE, UNKNOWN, YES, decide
from .play import put_forward
from .records import (
    ADDED_BYTES,
    AGAIN,
    AGAIN_COUNTED,
    BACK,
    BACKWARDS,
    BACKWARDS_COUNTED,
    BRIEF,
    BUSY,
    CLOCK,
    FORWARDS,
    FORWARDS_COUNTED,
    GRADIENT_BYTES,
    GRADIENTS_SEEN,
    HELD,
    HOME,
    INPUT_BYTES,
    INPUTS_SEEN,
    IS_OPEN,
    KEPT,
    LAST_BACKWARD,
    LAST_FORWARD,
    NEVER,
    OCCUPIED,
    ONWARD,
    OPEN_BACKWARD,
    OPEN_FORWARD,
    PEAK,
    RESIDENT,
    RUNNING_BYTES,
    TAKES,
    WAKE,
    WAY,
    WINDOW,
    WIRE,
)


def play_straight(cells: Cells) -> bool:
    """Play on until all has run, or (then False) until all that is left depends on what is left open."""
    while True:
        num_started = 0
        for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
            num_started += _go_on(cells, hop)
        if not num_started and not put_forward(cells):
            break
    is_over = True
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        worker = cells[hop + OWNER]
        _count_memory(cells, worker, hop)
        if cells[worker + BACKWARDS] < cells[worker + TOTAL]:
            is_over = False
    return is_over


def _go_on(cells: Cells, hop: int) -> int:
    """Let the worker of a hop choose as long as what is known decides it. 0: it has started nothing."""
    # What is read again and again is held in variables: after a store the row has to be read again.
    worker, before, after = cells[hop + OWNER], cells[hop + BEFORE], cells[hop + AFTER]
    now, wake, held = cells[worker + CLOCK], cells[worker + WAKE], cells[worker + HELD]
    forward, backward, busy = cells[worker + FORWARDS], cells[worker + BACKWARDS], cells[worker + BUSY]
    total, window, ahead = cells[worker + TOTAL], cells[worker + WINDOW], cells[worker + AHEAD]
    forwards, backwards = cells[worker + FORWARD], cells[worker + BACKWARD]
    open_forward, open_backward = cells[worker + OPEN_FORWARD], cells[worker + OPEN_BACKWARD]
    inputs, gradients = cells[hop + ROOM], cells[hop + OTHER_ROOM]
    inputs_until, gradients_until = _until(cells, before, ONWARD, KEPT), _until(cells, after, HOME, BACK)
    forward_ns, backward_ns = cells[hop + TAKES + KEPT], cells[hop + TAKES + BACK]
    begun = forward + 2 * backward + held
    while backward < total:
        if backward >= open_backward:
            wake = IS_OPEN
            break
        recomputes, gradient = cells[backwards + backward] & 1, cells[gradients + backward]
        activations, brief, until = NEVER, 1, 0 if forward < total else NEVER
        if forward < total and forward < open_forward:
            activations, brief, until = cells[inputs + forward], cells[forwards + forward] & 1, inputs_until
        is_planned, is_admitted = forward < cells[ahead + backward], forward - backward < window
        here, back = _is_here(activations, until, now), _is_here(gradient, gradients_until, now)
        kind = decide(is_planned, held != 0, here, is_admitted, brief != 0, back, recomputes != 0)
        if kind == UNKNOWN:
            here, back = int(here == YES), int(back == YES)  # if nothing comes that is not known
            kind = decide(is_planned, held != 0, here, is_admitted, brief != 0, back, recomputes != 0)
            wake = now if kind != NOTHING else min(_later(activations, now), _later(gradient, now))
            wake = wake if until else IS_OPEN
            break
        if kind == NOTHING:
            activations = until if activations == NEVER else activations
            gradient = gradients_until if gradient == NEVER else gradient
            now = min(_later(activations, now), _later(gradient, now))
        elif kind == FORTH:
            cells[hop + LAST_FORWARD] = now
            now, busy = now + forward_ns, busy + forward_ns
            cells[forwards + forward] = 2 * now + brief
            _pass_on(cells, hop, after, forward, now)
            forward += 1
        elif kind == RECOMPUTE:
            now, busy, held = now + forward_ns, busy + forward_ns, 1
            cells[ahead + backward] = now
        else:
            cells[hop + LAST_BACKWARD] = now
            now, busy, held = now + backward_ns, busy + backward_ns, 0
            cells[backwards + backward] = 2 * now + recomputes
            _pass_back(cells, hop, before, backward, now)
            backward += 1
    if backward == total:
        now = wake = NEVER
    cells[worker + CLOCK], cells[worker + WAKE], cells[worker + HELD] = now, wake, held
    cells[worker + FORWARDS], cells[worker + BACKWARDS], cells[worker + BUSY] = forward, backward, busy
    return forward + 2 * backward + held - begun


def _until(cells: Cells, sender: int, link: int, what: int) -> int:
    """What arrives before then from the neighbouring hop is known."""
    if not sender:
        return NEVER
    way = sender + link
    takes_ns = cells[sender + TAKES + what] + cells[way + OCCUPIED] + cells[way + WAY]
    return cells[cells[sender + OWNER] + CLOCK] + takes_ns


def _is_here(moment: int, until: int, now: int) -> int:
    """Whether what arrives at a moment, or is not known to arrive until then, is here now."""
    if moment <= now:
        return YES
    return MAYBE if moment == NEVER and until <= now else NO


def _later(moment: int, now: int) -> int:
    return moment if moment > now else NEVER


def _pass_on(cells: Cells, hop: int, after: int, turn: int, stop: int) -> None:
    if after:
        cells[cells[after + ROOM] + turn] = _send(cells, hop + ONWARD, stop)
    else:
        cells[cells[hop + OTHER_ROOM] + cells[cells[hop + PLACE] + turn]] = stop


def _pass_back(cells: Cells, hop: int, before: int, turn: int, stop: int) -> None:
    if before:
        cells[cells[before + OTHER_ROOM] + turn] = _send(cells, hop + HOME, stop)


def _send(cells: Cells, link: int, ready: int) -> int:
    """When a message arrives that can leave at `ready`."""
    wire = cells[link + WIRE]
    sent = max(ready, cells[wire]) + cells[link + OCCUPIED]
    cells[wire] = sent
    return sent + cells[link + WAY]


def _count_memory(cells: Cells, worker: int, hop: int) -> None:
    """Count on through the operations that have run, as far as it is known what had come by their ends."""
    inputs_until = _until(cells, cells[hop + BEFORE], ONWARD, KEPT)
    gradients_until = _until(cells, cells[hop + AFTER], HOME, BACK)
    inputs, gradients = cells[hop + ROOM], cells[hop + OTHER_ROOM]
    num_inputs, num_gradients, count = (
        cells[hop + INPUTS_SEEN],
        cells[hop + GRADIENTS_SEEN],
        cells[hop + COUNT],
    )
    forward, backward = cells[worker + FORWARDS_COUNTED], cells[worker + BACKWARDS_COUNTED]
    resident, peak, held = cells[worker + RESIDENT], cells[worker + PEAK], cells[worker + AGAIN_COUNTED]
    while forward < cells[worker + FORWARDS] or backward < cells[worker + BACKWARDS]:
        what, stop = _ended(cells, worker, forward, backward, held)
        while num_inputs < count and cells[inputs + num_inputs] < stop:
            num_inputs, resident = num_inputs + 1, resident + cells[hop + INPUT_BYTES]
        while num_gradients < count and cells[gradients + num_gradients] < stop:
            num_gradients, resident = num_gradients + 1, resident + cells[hop + GRADIENT_BYTES]
        if inputs_until < stop and num_inputs < count and cells[inputs + num_inputs] == NEVER:
            break
        if gradients_until < stop and num_gradients < count and cells[gradients + num_gradients] == NEVER:
            break
        peak = max(peak, resident + cells[hop + RUNNING_BYTES + what])
        resident += cells[hop + ADDED_BYTES + what]
        held = int(what == AGAIN)
        backward += int(what == BACK)
        forward += int(what < AGAIN)
    cells[hop + INPUTS_SEEN], cells[hop + GRADIENTS_SEEN] = num_inputs, num_gradients
    cells[worker + FORWARDS_COUNTED], cells[worker + BACKWARDS_COUNTED] = forward, backward
    cells[worker + RESIDENT], cells[worker + PEAK], cells[worker + AGAIN_COUNTED] = resident, peak, held


def _ended(cells: Cells, worker: int, forward: int, backward: int, held: int) -> tuple[int, int]:
    """(what it did, when that ended) of the worker's next operation, of those that have run."""
    forth, back = 2 * NEVER - 1, 2 * NEVER - 1
    if forward < cells[worker + FORWARDS]:
        forth = cells[cells[worker + FORWARD] + forward]
    if backward < cells[worker + BACKWARDS]:
        back = cells[cells[worker + BACKWARD] + backward]
    if forth < back:
        return BRIEF if forth & 1 else KEPT, forth >> 1
    if back & 1 and not held:
        return AGAIN, cells[cells[worker + AHEAD] + backward]
    return BACK, back >> 1
