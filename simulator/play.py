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
    OPEN_BACKWARD,
    OPEN_FORWARD,
    PEAK,
    RESIDENT,
    RUNNING_BYTES,
    SENDER,
    SOURCE_FIELDS,
    SOURCES,
    SOURCES_END,
    STOP,
    STREAM,
    TAKES,
    WAKE,
    WAY,
    WINDOW,
    WIRE,
)


def play(cells: Cells, seed: int) -> bool:
    """Play on until all has run, or (then False) until a worker comes to what is left open."""
    while True:
        num_started = 0
        for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
            bound = NEVER
            for source in range(cells[worker + SOURCES], cells[worker + SOURCES_END], SOURCE_FIELDS):
                bound = min(bound, cells[cells[source + SENDER] + CLOCK] + cells[source + LEAST])
            started = _go_on(cells, worker, bound, seed)
            if started < 0:
                return False
            num_started += started
        if not num_started and not _put_forward(cells):
            return True


def _put_forward(cells: Cells) -> bool:
    """Where nobody can start anything at its clock: to the next moment when somebody may. False: never."""
    nearest = NEVER
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        nearest = min(nearest, cells[worker + WAKE])
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        cells[worker + CLOCK] = max(cells[worker + CLOCK], nearest)
    return nearest < NEVER


def _go_on(cells: Cells, worker: int, bound: int, seed: int) -> int:
    """Let a worker choose while its clock is below `bound`. The number of operations that it starts, or -1
    where it would decide what is left open."""
    num_started = 0
    while cells[worker + CLOCK] < bound:
        now = cells[worker + CLOCK]
        if cells[worker + CURRENT]:
            _end(cells, worker, now)
        forward, backward = cells[worker + FORWARDS], cells[worker + BACKWARDS]
        if backward == cells[worker + TOTAL]:
            cells[worker + CLOCK] = cells[worker + WAKE] = NEVER
            break
        if forward >= cells[worker + OPEN_FORWARD] or backward >= cells[worker + OPEN_BACKWARD]:
            return -1
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
            cells[worker + HELD] != 0,
            activations <= now,
            cells[worker + IN_FLIGHT] < cells[worker + WINDOW] or enters == 0,
            brief != 0,
            gradient <= now,
            recomputes != 0,
        )
        if kind == NOTHING:
            wake = activations if activations > now else NEVER
            if gradient > now:
                wake = min(wake, gradient)
            cells[worker + WAKE] = wake
            cells[worker + CLOCK] = min(wake, bound)
            continue
        num_started += 1
        if kind == FORTH:
            _forward(cells, worker, hop, BRIEF if brief else KEPT, seed)
        elif kind == RECOMPUTE:
            cells[worker + HELD] = 1
            _start(cells, worker, back, AGAIN)
        else:
            _backward(cells, worker, back, seed)
    return num_started


def _forward(cells: Cells, worker: int, hop: int, what: int, seed: int) -> None:
    turn = cells[hop + FORWARDS_DONE]
    cells[hop + LAST_FORWARD] = cells[worker + CLOCK]
    stop = _start(cells, worker, hop, what)
    cells[worker + FORWARDS] += 1
    cells[worker + IN_FLIGHT] += cells[hop + ENTERS]
    cells[hop + FORWARDS_DONE] = turn + 1
    after = cells[hop + AFTER]
    if after:
        arrival = _send(cells, hop + ONWARD, turn, stop, seed)
        cells[cells[after + ROOM] + turn] = arrival
        _announce(cells, cells[after + OWNER], arrival)
    else:
        cells[cells[hop + OTHER_ROOM] + cells[cells[hop + PLACE] + turn]] = stop


def _backward(cells: Cells, worker: int, hop: int, seed: int) -> None:
    turn = cells[hop + BACKWARDS_DONE]
    cells[hop + LAST_BACKWARD] = cells[worker + CLOCK]
    stop = _start(cells, worker, hop, BACK)
    cells[worker + HELD] = 0
    cells[worker + BACKWARDS] += 1
    cells[worker + IN_FLIGHT] -= cells[hop + ENTERS]
    cells[hop + BACKWARDS_DONE] = turn + 1
    before = cells[hop + BEFORE]
    if before:
        arrival = _send(cells, hop + HOME, turn, stop, seed)
        cells[cells[before + OTHER_ROOM] + turn] = arrival
        _announce(cells, cells[before + OWNER], arrival)


def _start(cells: Cells, worker: int, hop: int, what: int) -> int:
    """When the operation ends."""
    now, takes = cells[worker + CLOCK], cells[hop + TAKES + what]
    if cells[worker + LOG]:
        entry = cells[worker + LOG] + 2 * cells[worker + NUM_LOGGED]
        cells[entry] = 4 * hop + what
        cells[entry + 1] = now
        cells[worker + NUM_LOGGED] += 1
    stop = now + takes
    cells[worker + BUSY] += takes
    cells[worker + CURRENT] = 4 * hop + what
    cells[worker + CLOCK] = cells[worker + WAKE] = cells[worker + STOP] = stop
    return stop


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


def _end(cells: Cells, worker: int, now: int) -> None:
    """The operation is over: what was the most that the worker held, and what is left of it."""
    resident = cells[worker + RESIDENT]
    for visit in range(cells[worker + VISITS], cells[worker + VISITS_END]):
        hop = cells[visit]
        seen, room, count = cells[hop + INPUTS_SEEN], cells[hop + ROOM], cells[hop + COUNT]
        while seen < count and cells[room + seen] < now:
            seen += 1
            resident += cells[hop + INPUT_BYTES]
        cells[hop + INPUTS_SEEN] = seen
        seen, room = cells[hop + GRADIENTS_SEEN], cells[hop + OTHER_ROOM]
        while seen < count and cells[room + seen] < now:
            seen += 1
            resident += cells[hop + GRADIENT_BYTES]
        cells[hop + GRADIENTS_SEEN] = seen
    hop, what = cells[worker + CURRENT] >> 2, cells[worker + CURRENT] & 3
    cells[worker + CURRENT] = 0
    cells[worker + PEAK] = max(cells[worker + PEAK], resident + cells[hop + RUNNING_BYTES + what])
    cells[worker + RESIDENT] = resident + cells[hop + ADDED_BYTES + what]
