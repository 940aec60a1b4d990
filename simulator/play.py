"""The pipelines of one component of a plan, played operation by operation under the next-operation policy.

Every worker has a clock: up to there it is decided what it does. It may go on to choose at its clock if no
message can come by then that is not yet known, that is while its clock is below that of every worker that
sends to it plus the least time from the start of an operation there to the arrival of its message. Such a
conservative simulation (Chandy and Misra, CACM 24, 1981) needs no queue of events: when an operation starts,
its end and the arrival of what it sends are known. The answer does not depend on who goes on first. Where all
are idle until something known arrives, all clocks are put forward to the first such moment.

At one instant, operations end first, then messages arrive, then workers choose. Every operation takes at
least a nanosecond.
"""

from __future__ import annotations

from ..pipeline.flat import (
    AFTER,
    AHEAD,
    BACKWARD,
    BEFORE,
    COUNT,
    ENTERS,
    FORWARD,
    OTHER_ROOM,
    OWNER,
    PLACE,
    ROOM,
    TOTAL,
    VISITS,
    VISITS_END,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
)
from ..pipeline.policy import FORWARD as FORTH
from ..pipeline.policy import NOTHING, RECOMPUTE, decide
from .draws import exponential
from .records import (
    ADDED_BYTES,
    AGAIN,
    BACK,
    BACKWARDS,
    BACKWARDS_DONE,
    BRIEF,
    BUSY,
    CHANNEL,
    CLOCK,
    CURRENT,
    FORWARDS,
    FORWARDS_DONE,
    GRADIENT_BYTES,
    GRADIENTS_SEEN,
    HELD,
    HOME,
    IN_FLIGHT,
    INPUT_BYTES,
    INPUTS_SEEN,
    JITTER,
    KEPT,
    LAST_BACKWARD,
    LAST_FORWARD,
    LEAST,
    LOG,
    NEVER,
    NUM_LOGGED,
    NUMBERED,
    OCCUPIED,
    ONWARD,
    PEAK,
    RESIDENT,
    RUNNING_BYTES,
    SENDER,
    SOURCE_FIELDS,
    SOURCES,
    SOURCES_END,
    STREAM,
    TAKES,
    WAKE,
    WAY,
    WINDOW,
    WIRE,
)


def play(cells: Cells, seed: int) -> None:
    """Play until all has run."""
    while True:
        num_started = 0
        for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
            bound = NEVER
            for source in range(cells[worker + SOURCES], cells[worker + SOURCES_END], SOURCE_FIELDS):
                bound = min(bound, cells[cells[source + SENDER] + CLOCK] + cells[source + LEAST])
            num_started += _go_on(cells, worker, bound, seed)
        if not num_started and not _put_forward(cells):
            break


def _put_forward(cells: Cells) -> bool:
    """Where nobody can start anything at its clock: to the next moment when somebody may. False: never."""
    nearest = NEVER
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        nearest = min(nearest, cells[worker + WAKE])
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        cells[worker + CLOCK] = max(cells[worker + CLOCK], nearest)
    return nearest < NEVER


def _go_on(cells: Cells, worker: int, bound: int, seed: int) -> int:
    """Let a worker choose while its clock is below `bound`. The number of operations that it starts."""
    # What changes with each operation is held in variables: a store to the row would have to be read back.
    now, wake, current = cells[worker + CLOCK], cells[worker + WAKE], cells[worker + CURRENT]
    forward, backward = cells[worker + FORWARDS], cells[worker + BACKWARDS]
    in_flight, held = cells[worker + IN_FLIGHT], cells[worker + HELD]
    resident, peak, busy = cells[worker + RESIDENT], cells[worker + PEAK], cells[worker + BUSY]
    num_started = 0
    while now < bound:
        if current:  # an operation is over
            resident += _arrived(cells, worker, now)
            peak = max(peak, resident + cells[current + RUNNING_BYTES])
            resident += cells[current + ADDED_BYTES]
            current = 0
        if backward == cells[worker + TOTAL]:
            now = wake = NEVER
            break
        hop, what, wake = _next(cells, worker, now, forward, backward, in_flight, held)
        if not hop:
            now = min(wake, bound)
            continue
        current = hop + what
        stop = now + cells[current + TAKES]
        if cells[worker + LOG]:
            _note(cells, worker, current, now)
        if what == AGAIN:
            held = 1
        elif what == BACK:
            backward, in_flight, held = backward + 1, in_flight - cells[hop + ENTERS], 0
            _pass_back(cells, hop, now, stop, seed)
        else:
            forward, in_flight = forward + 1, in_flight + cells[hop + ENTERS]
            _pass_on(cells, hop, now, stop, seed)
        busy += stop - now
        now = wake = stop
        num_started += 1
    cells[worker + CLOCK], cells[worker + WAKE], cells[worker + CURRENT] = now, wake, current
    cells[worker + FORWARDS], cells[worker + BACKWARDS] = forward, backward
    cells[worker + IN_FLIGHT], cells[worker + HELD] = in_flight, held
    cells[worker + RESIDENT], cells[worker + PEAK], cells[worker + BUSY] = resident, peak, busy
    return num_started


def _next(
    cells: Cells, worker: int, now: int, forward: int, backward: int, in_flight: int, held: int
) -> tuple[int, int, int]:
    """(hop, what it does, 0) of the operation that a worker starts now; or (0, 0, when it may be another)."""
    code = cells[cells[worker + BACKWARD] + backward]
    back, recomputes = code >> 1, code & 1
    gradient = cells[cells[back + OTHER_ROOM] + cells[back + BACKWARDS_DONE]]
    hop, brief, activations, enters = 0, 0, NEVER, 1
    if forward < cells[worker + TOTAL]:
        code = cells[cells[worker + FORWARD] + forward]
        hop, brief = code >> 1, code & 1
        activations = cells[cells[hop + ROOM] + cells[hop + FORWARDS_DONE]]
        enters = cells[hop + ENTERS]
    kind = decide(
        forward < cells[cells[worker + AHEAD] + backward],
        held != 0,
        activations <= now,
        in_flight < cells[worker + WINDOW] or enters == 0,
        brief != 0,
        gradient <= now,
        recomputes != 0,
    )
    if kind == FORTH:
        return hop, BRIEF if brief else KEPT, 0
    if kind != NOTHING:
        return back, AGAIN if kind == RECOMPUTE else BACK, 0
    wake = activations if activations > now else NEVER
    return 0, 0, min(wake, gradient) if gradient > now else wake


def _pass_on(cells: Cells, hop: int, start: int, stop: int, seed: int) -> None:
    """A forward runs: where its activations go, and when they are there."""
    turn, after = cells[hop + FORWARDS_DONE], cells[hop + AFTER]
    cells[hop + LAST_FORWARD] = start
    cells[hop + FORWARDS_DONE] = turn + 1
    if after:
        arrival = _send(cells, hop + ONWARD, turn, stop, seed)
        cells[cells[after + ROOM] + turn] = arrival
        _announce(cells, cells[after + OWNER], arrival)
    else:
        cells[cells[hop + OTHER_ROOM] + cells[cells[hop + PLACE] + turn]] = stop


def _pass_back(cells: Cells, hop: int, start: int, stop: int, seed: int) -> None:
    """A backward runs: where its gradients go, and when they are there."""
    turn, before = cells[hop + BACKWARDS_DONE], cells[hop + BEFORE]
    cells[hop + LAST_BACKWARD] = start
    cells[hop + BACKWARDS_DONE] = turn + 1
    if before:
        arrival = _send(cells, hop + HOME, turn, stop, seed)
        cells[cells[before + OTHER_ROOM] + turn] = arrival
        _announce(cells, cells[before + OWNER], arrival)


def _note(cells: Cells, worker: int, what: int, start: int) -> None:
    entry = cells[worker + LOG] + 2 * cells[worker + NUM_LOGGED]
    cells[entry], cells[entry + 1] = what, start
    cells[worker + NUM_LOGGED] += 1


def _send(cells: Cells, link: int, turn: int, ready: int, seed: int) -> int:
    """When a message arrives that can leave at `ready`."""
    wire = cells[link + WIRE]
    if not wire:
        return ready
    sent = max(ready, cells[wire]) + cells[link + OCCUPIED]
    cells[wire] = sent
    arrival = sent + cells[link + WAY]
    if cells[link + JITTER]:
        number = cells[link + NUMBERED] + turn
        arrival += exponential(seed, cells[link + STREAM], number, cells[link + JITTER])
        channel = cells[link + CHANNEL]
        arrival = max(arrival, cells[channel])  # a connection keeps its order
        cells[channel] = arrival
    return arrival


def _announce(cells: Cells, worker: int, arrival: int) -> None:
    """To a worker that is idle, and may know of nothing that comes."""
    if not cells[worker + CURRENT]:
        cells[worker + WAKE] = min(cells[worker + WAKE], arrival)


def _arrived(cells: Cells, worker: int, now: int) -> int:
    """Bytes of what has come to the worker before now and was not counted."""
    size_bytes = 0
    for visit in range(cells[worker + VISITS], cells[worker + VISITS_END]):
        hop = cells[visit]
        count = cells[hop + COUNT]
        first, room = cells[hop + INPUTS_SEEN], cells[hop + ROOM]
        seen = first
        while seen < count and cells[room + seen] < now:
            seen += 1
        if seen > first:
            cells[hop + INPUTS_SEEN] = seen
            size_bytes += (seen - first) * cells[hop + INPUT_BYTES]
        first, room = cells[hop + GRADIENTS_SEEN], cells[hop + OTHER_ROOM]
        seen = first
        while seen < count and cells[room + seen] < now:
            seen += 1
        if seen > first:
            cells[hop + GRADIENTS_SEEN] = seen
            size_bytes += (seen - first) * cells[hop + GRADIENT_BYTES]
    return size_bytes
