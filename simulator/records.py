"""The fields that a play adds to the records of `pipeline.flat`, and how they are when it begins.

Times are in whole nanoseconds.
"""

from __future__ import annotations

from typing import Any

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
    AGAIN_COUNTED,  # 1: the recomputation of the next backward, too
    WINDOW,
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


def leave_open(cells: Cells, shorter: Cells) -> None:
    """Leave open what a pipeline may do otherwise than the same with one micro-batch less."""
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        total, forward, backward = shorter[worker + TOTAL], cells[worker + FORWARD], cells[worker + BACKWARD]
        entry = 0
        while entry < total and cells[forward + entry] == shorter[forward + entry]:
            entry += 1
        cells[worker + OPEN_FORWARD] = entry
        ahead, entry = cells[worker + AHEAD], 0
        while (
            entry < total
            and cells[ahead + entry] == shorter[ahead + entry]
            and cells[backward + entry] == shorter[backward + entry]
        ):
            entry += 1
        cells[worker + OPEN_BACKWARD] = entry


def close(cells: Cells) -> None:
    """Leave nothing open."""
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        cells[worker + OPEN_BACKWARD] = cells[worker + OPEN_FORWARD] = NEVER


def take_over(cells: Cells, played: Cells) -> None:
    """Go on from where a pipeline is that is alike and was played so far. Records lie at the same places.

    Its own are its orders, from where they have not been followed, with their numbers and its windows.
    """
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        window = cells[worker + WINDOW]
        _copy(cells, played, worker + CLOCK, PLAY_WORKER_SIZE - CLOCK)
        cells[worker + WINDOW] = window
        _copy(cells, played, cells[worker + FORWARD], cells[worker + FORWARDS])
        _copy(cells, played, cells[worker + BACKWARD], cells[worker + BACKWARDS])
        _copy(cells, played, cells[worker + AHEAD], cells[worker + BACKWARDS] + cells[worker + HELD])
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        _copy(cells, played, hop + FORWARDS_DONE, PLAY_HOP_SIZE - FORWARDS_DONE)
        _copy(cells, played, cells[hop + ROOM], cells[hop + COUNT])
        _copy(cells, played, cells[hop + OTHER_ROOM], cells[hop + COUNT])
    _copy(cells, played, cells[FREE], cells[ROOMS] - cells[FREE])


def _copy(cells: Any, played: Any, start: int, length: int) -> None:
    cells[start : start + length] = played[start : start + length]
