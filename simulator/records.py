"""The fields that a play adds to the records of `pipeline.flat`, and how they are when it begins.

Times are in whole nanoseconds.
"""

from __future__ import annotations

from ..pipeline.flat import (
    AHEAD,
    BACKWARD,
    BEFORE,
    COUNT,
    FORWARD,
    FREE,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    OTHER_ROOM,
    OWNER,
    ROOM,
    ROOMS,
    TOTAL,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
)
from ..pipeline.schedules import RECORDS

NEVER = 1 << 62  # a time that does not come, a number that is not reached
IS_OPEN = -1  # instead of a time: what comes is left open

NONE, ALL, SOME = range(3)

# What a hop does: a forward that keeps what its backward needs; one that does not, for it will be done again;
# that; a backward.
KEPT, BRIEF, AGAIN, BACK = range(4)

# Of a hop: how far it is.
(
    FORWARDS_DONE,
    BACKWARDS_DONE,
    INPUTS_SEEN,  # counted as resident
    GRADIENTS_SEEN,
    LAST_FORWARD,  # the start of the last one
    LAST_BACKWARD,
) = range(RECORDS[1], RECORDS[1] + 6)
# Its rooms hold when its inputs and its gradients arrive. Then, for KEPT, BRIEF, AGAIN and BACK:
TAKES = LAST_BACKWARD + 1
RUNNING_BYTES = TAKES + 4  # while it runs, beyond what was there when it began
ADDED_BYTES = RUNNING_BYTES + 4  # after it, beyond what was there when it began
INPUT_BYTES = ADDED_BYTES + 4
GRADIENT_BYTES = INPUT_BYTES + 1
ONWARD = GRADIENT_BYTES + 1  # the link of its activations, to the next hop

# Of a link.
(
    WIRE,  # where it stands until when it is taken; 0 if messages stay on the worker
    CHANNEL,  # where the last arrival stands: what travels in one keeps its order
    OCCUPIED,  # by a message
    WAY,
    JITTER,  # mean
    STREAM,  # of draws
    NUMBERED,  # the number of the first message
    LINK_FIELDS,
) = range(8)

HOME = ONWARD + LINK_FIELDS  # the link of its gradients, to the hop before
PLAY_HOP_SIZE = HOME + LINK_FIELDS

# Of a worker.
(
    CLOCK,
    WAKE,  # the first known moment, not before its clock, at which it may have something to do
    FORWARDS,
    BACKWARDS,
    IN_FLIGHT,
    HELD,  # 1: the recomputation of its first backward was its last operation
    CURRENT,  # hop + what it does until its clock, or 0
    RESIDENT,  # bytes beyond its state
    PEAK,
    BUSY,
    FORWARDS_COUNTED,  # whose memory has been counted, where that is done afterwards
    BACKWARDS_COUNTED,
    WINDOW,
    RECOMPUTED,  # NONE, ALL or SOME of its micro-batches
    OPEN_FORWARD,  # numbers of forwards and backwards from which on it is left open what it does
    OPEN_BACKWARD,
    SOURCES,  # where its sources stand
    SOURCES_END,
    LOG,  # where its operations are written, if they are: hop + what, and the start
    NUM_LOGGED,
    PLAY_WORKER_SIZE,
) = range(RECORDS[0], RECORDS[0] + 21)

# Of a source, a worker that sends to another.
(
    SENDER,
    LEAST,  # from the start of an operation there to the arrival of its message
    SOURCE_FIELDS,
) = range(3)


def empty_rooms(cells: Cells) -> None:
    """Make the rooms ready for a play, whatever a schedule has left in them."""
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        arrival = NEVER if cells[hop + BEFORE] else 0  # a first hop's inputs are its samples
        for entry in range(cells[hop + COUNT]):
            cells[cells[hop + ROOM] + entry] = arrival
            cells[cells[hop + OTHER_ROOM] + entry] = NEVER


def recomputed(orders: Cells, worker: int) -> int:
    """Whether `NONE`, `ALL` or `SOME` of a worker's micro-batches are recomputed."""
    count = 0
    for entry in range(orders[worker + TOTAL]):
        count += orders[orders[worker + BACKWARD] + entry] & 1
    if count == 0:
        return NONE
    return ALL if count == orders[worker + TOTAL] else SOME


def furnish_ends(cells: Cells) -> None:
    """Make the rooms of a straight pipeline ready in which no other hop's messages arrive."""
    first, last = cells[HOPS], cells[HOPS_END] - cells[HOP_SIZE]
    for entry in range(cells[first + COUNT]):
        cells[cells[first + ROOM] + entry] = 0  # samples
        cells[cells[last + OTHER_ROOM] + entry] = NEVER


def find_open(orders: Cells, shorter: Cells, found: Cells) -> None:
    """From which forward and which backward on each worker may do otherwise than the same with one
    micro-batch less."""
    place = 0
    for worker in range(orders[WORKERS], orders[WORKERS_END], orders[WORKER_SIZE]):
        total, forward, backward = (
            shorter[worker + TOTAL],
            orders[worker + FORWARD],
            orders[worker + BACKWARD],
        )
        entry = 0
        while entry < total and orders[forward + entry] == shorter[forward + entry]:
            entry += 1
        found[place] = entry
        ahead, entry = orders[worker + AHEAD], 0
        while (
            entry < total
            and orders[ahead + entry] == shorter[ahead + entry]
            and orders[backward + entry] == shorter[backward + entry]
        ):
            entry += 1
        found[place + 1] = entry
        place += 2


def leave_open(cells: Cells, open_at: Cells) -> None:
    """Leave open what `find_open` has found."""
    place = 0
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        cells[worker + OPEN_FORWARD], cells[worker + OPEN_BACKWARD] = open_at[place], open_at[place + 1]
        place += 2


def close(cells: Cells) -> None:
    """Leave nothing open."""
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        cells[worker + OPEN_BACKWARD] = cells[worker + OPEN_FORWARD] = NEVER


def take_over(cells: Cells, played: Cells, orders: Cells) -> None:
    """Go on from where a straight pipeline is that is alike and was played so far, under orders of its own.

    Records lie at the same places. Of moments nobody looks at those before what was counted last.
    """
    _copy(cells, played, 0, played[HOPS_END])
    _copy(cells, played, played[FREE], played[ROOMS])
    furnish_ends(cells)
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        worker = cells[hop + OWNER]
        cells[hop + COUNT] = cells[worker + TOTAL] = orders[worker + TOTAL]
        cells[worker + WINDOW] = orders[worker + WINDOW]
        cells[worker + RECOMPUTED] = orders[worker + RECOMPUTED]
        forward = max(0, cells[worker + FORWARDS_COUNTED] - 1)
        backward = max(0, cells[worker + BACKWARDS_COUNTED] - 1)
        _copy(
            cells,
            played,
            cells[worker + FORWARD] + forward,
            cells[worker + FORWARD] + cells[worker + FORWARDS],
        )
        for field in (BACKWARD, AHEAD):
            start = cells[worker + field]
            _copy(cells, played, start + backward, start + cells[worker + BACKWARDS] + cells[worker + HELD])
        forward = min(cells[worker + FORWARDS], cells[hop + INPUTS_SEEN])
        backward = min(cells[worker + BACKWARDS], cells[hop + GRADIENTS_SEEN])
        for field, first in ((ROOM, forward), (OTHER_ROOM, backward)):
            start = cells[hop + field]
            _copy(cells, played, start + first, start + cells[hop + COUNT])


def _copy(cells: Cells, played: Cells, start: int, end: int) -> None:
    for place in range(start, end):
        cells[place] = played[place]
