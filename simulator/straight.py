"""The same as `play`, and much faster, for a pipeline that comes to each worker once, without jitter.

A worker goes on beyond the clocks of its neighbours as long as what it chooses does not hang on anything
that is not yet known: mostly the inputs that it looks at are known, in its own future or past. So each
visit brings it far.

The static orders are read from cells of their own, `orders`, that are laid out alike: several plays share
them. Where they would stand, `cells` hold when each operation ended. Those and the rooms hold whatever an
earlier play left there: of messages as many are known as the neighbour has sent.
"""

from __future__ import annotations

from typing import NamedTuple

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
from ..pipeline.policy import NOTHING, RECOMPUTE, foresee
from .records import (
    AGAIN,
    ALL,
    BACK,
    BACKWARDS,
    BUSY,
    CLOCK,
    FORWARDS,
    HELD,
    HOME,
    IS_OPEN,
    KEPT,
    LAST_BACKWARD,
    LAST_FORWARD,
    NEVER,
    OCCUPIED,
    ONWARD,
    OPEN_BACKWARD,
    OPEN_FORWARD,
    RECOMPUTED,
    SOME,
    TAKES,
    WAY,
    WINDOW,
    WIRE,
)
from .resident import count_memory


def play_straight(cells: Cells, orders: Cells) -> bool:
    """Play on until all has run, or (then False) until all that is left depends on what is left open."""
    while True:
        num_started = 0
        for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
            num_started += _go_on(cells, orders, hop)
        if not num_started and not _put_forward(cells, orders):
            break
    is_over = True
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        inputs, gradients = _inputs_known(cells, hop), _gradients_known(cells, hop)
        count_memory(cells, orders, hop, inputs[0], gradients[0], min(inputs[1], gradients[1]))
        is_over &= _note_last(cells, hop)
    return is_over


def _note_last(cells: Cells, hop: int) -> bool:
    """Write down when the last operations began. Whether all of the hop's have run."""
    worker = cells[hop + OWNER]
    forward, backward = cells[worker + FORWARDS] - 1, cells[worker + BACKWARDS] - 1
    if forward >= 0:
        cells[hop + LAST_FORWARD] = cells[cells[worker + FORWARD] + forward] - cells[hop + TAKES + KEPT]
    if backward >= 0:
        cells[hop + LAST_BACKWARD] = cells[cells[worker + BACKWARD] + backward] - cells[hop + TAKES + BACK]
    return backward == cells[worker + TOTAL] - 1


class _Rows(NamedTuple):
    """Where it stands when a hop's operations ended and when what they need arrives; the worker's window, and
    which of its micro-batches it recomputes."""

    forwards: int
    backwards: int
    recomputations: int
    inputs: int
    gradients: int
    window: int
    recomputed: int


def _go_on(cells: Cells, orders: Cells, hop: int) -> int:
    """Let the worker of a hop go on as long as what is known decides it. 0: it has started nothing."""
    # What is read again and again is held in variables: after a store the row has to be read again.
    worker, before, after = cells[hop + OWNER], cells[hop + BEFORE], cells[hop + AFTER]
    now, held, busy = cells[worker + CLOCK], cells[worker + HELD], cells[worker + BUSY]
    forward, backward = cells[worker + FORWARDS], cells[worker + BACKWARDS]
    forward_ns, backward_ns = cells[hop + TAKES + KEPT], cells[hop + TAKES + BACK]
    again_ns = cells[hop + TAKES + AGAIN]
    rows, inputs, gradients = _rows(cells, hop), _inputs_known(cells, hop), _gradients_known(cells, hop)
    if inputs[0] >= cells[worker + OPEN_FORWARD]:
        inputs = cells[worker + OPEN_FORWARD], 0
    begun, end = forward + 2 * backward + held, min(cells[worker + TOTAL], cells[worker + OPEN_BACKWARD])
    while backward < end:
        kind, start = _next(cells, orders, rows, now, forward, backward, held, inputs, gradients)
        if kind == NOTHING:
            now = start
            break
        if kind == FORTH:
            now, busy = start + forward_ns, busy + forward_ns
            cells[rows.forwards + forward] = now
            if after:
                cells[cells[after + ROOM] + forward] = _send(cells, hop + ONWARD, now)
            else:
                cells[rows.gradients + orders[orders[hop + PLACE] + forward]] = now
            forward += 1
        elif kind == RECOMPUTE:
            now, busy, held = start + again_ns, busy + again_ns, 1
            cells[rows.recomputations + backward] = now
        else:
            now, busy, held = start + backward_ns, busy + backward_ns, 0
            cells[rows.backwards + backward] = now
            if before:
                cells[cells[before + OTHER_ROOM] + backward] = _send(cells, hop + HOME, now)
            backward += 1
    cells[worker + CLOCK] = NEVER if backward == cells[worker + TOTAL] else now
    cells[worker + HELD], cells[worker + BUSY] = held, busy
    cells[worker + FORWARDS], cells[worker + BACKWARDS] = forward, backward
    return forward + 2 * backward + held - begun


def _next(
    cells: Cells,
    orders: Cells,
    rows: _Rows,
    now: int,
    forward: int,
    backward: int,
    held: int,
    inputs: tuple[int, int],
    gradients: tuple[int, int],
) -> tuple[int, int]:
    """(what the worker of a hop runs next, when that starts).

    `NOTHING`: it hangs on what is not known, and nothing starts before.
    """
    kind, start = _foreseen(cells, orders, rows, now, forward, backward, held, inputs, gradients)
    if kind == FORTH:
        return (kind if forward < inputs[0] else NOTHING), start
    if backward < gradients[0]:
        return kind, start
    if kind == RECOMPUTE:  # it goes ahead of its gradient if it does so however late that comes
        late = gradients[0], NEVER
        kind, _ = _foreseen(cells, orders, rows, now, forward, backward, held, inputs, late)
    return (kind if kind == RECOMPUTE else NOTHING), start


def _foreseen(
    cells: Cells,
    orders: Cells,
    rows: _Rows,
    now: int,
    forward: int,
    backward: int,
    held: int,
    inputs: tuple[int, int],
    gradients: tuple[int, int],
) -> tuple[int, int]:
    """`foresee`, where inputs and gradients that are not known come as early as they may."""
    activations, is_brief, gradient = inputs[1], True, gradients[1]
    if forward < inputs[0]:
        activations = cells[rows.inputs + forward]
        is_brief = _recomputes(orders, rows, rows.forwards + forward)
    if backward < gradients[0]:
        gradient = cells[rows.gradients + backward]
    return foresee(
        now,
        activations,
        gradient,
        forward < orders[rows.recomputations + backward],
        held != 0,
        forward - backward < rows.window,
        is_brief,
        _recomputes(orders, rows, rows.backwards + backward),
    )


def _recomputes(orders: Cells, rows: _Rows, place: int) -> bool:
    """Whether an operation is of a micro-batch that is recomputed; its cell is read only where it tells."""
    return orders[place] & 1 != 0 if rows.recomputed == SOME else rows.recomputed == ALL


def _rows(cells: Cells, hop: int) -> _Rows:
    worker = cells[hop + OWNER]
    return _Rows(
        forwards=cells[worker + FORWARD],
        backwards=cells[worker + BACKWARD],
        recomputations=cells[worker + AHEAD],
        inputs=cells[hop + ROOM],
        gradients=cells[hop + OTHER_ROOM],
        window=cells[worker + WINDOW],
        recomputed=cells[worker + RECOMPUTED],
    )


def _inputs_known(cells: Cells, hop: int) -> tuple[int, int]:
    """(how many inputs of a hop are known, and before when no other comes)."""
    before = cells[hop + BEFORE]
    known = cells[cells[before + OWNER] + FORWARDS] if before else cells[hop + COUNT]
    return known, NEVER if known == cells[hop + COUNT] else _until(cells, before, ONWARD, KEPT)


def _gradients_known(cells: Cells, hop: int) -> tuple[int, int]:
    """(how many gradients of a hop are known, and before when no other comes)."""
    after = cells[hop + AFTER]
    if not after:  # those of forwards that have not run are known never to come so far
        return cells[hop + COUNT], NEVER
    known = cells[cells[after + OWNER] + BACKWARDS]
    return known, NEVER if known == cells[hop + COUNT] else _until(cells, after, HOME, BACK)


def _until(cells: Cells, sender: int, link: int, what: int) -> int:
    """Before then nothing more arrives from a neighbouring hop."""
    way = sender + link
    takes_ns = cells[sender + TAKES + what] + cells[way + OCCUPIED] + cells[way + WAY]
    return cells[cells[sender + OWNER] + CLOCK] + takes_ns


def _send(cells: Cells, link: int, ready: int) -> int:
    """When a message arrives that can leave at `ready`."""
    wire = cells[link + WIRE]
    sent = max(ready, cells[wire]) + cells[link + OCCUPIED]
    cells[wire] = sent
    return sent + cells[link + WAY]


def _put_forward(cells: Cells, orders: Cells) -> bool:
    """Where nobody can start anything at its clock: to the next moment when somebody may. False: never."""
    nearest = NEVER
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        nearest = min(nearest, _wakes(cells, orders, hop))
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        worker = cells[hop + OWNER]
        cells[worker + CLOCK] = max(cells[worker + CLOCK], nearest)
    return 0 <= nearest < NEVER


def _wakes(cells: Cells, orders: Cells, hop: int) -> int:
    """When the worker of a hop may start something if nothing comes that is not known; or `IS_OPEN`."""
    worker = cells[hop + OWNER]
    now, forward, backward = cells[worker + CLOCK], cells[worker + FORWARDS], cells[worker + BACKWARDS]
    if backward == cells[worker + TOTAL]:
        return NEVER
    if (
        backward >= cells[worker + OPEN_BACKWARD]
        or cells[worker + OPEN_FORWARD] <= forward < cells[worker + TOTAL]
    ):
        return IS_OPEN
    inputs, gradients = (_inputs_known(cells, hop)[0], NEVER), (_gradients_known(cells, hop)[0], NEVER)
    held, rows = cells[worker + HELD], _rows(cells, hop)
    return _foreseen(cells, orders, rows, now, forward, backward, held, inputs, gradients)[1]
