"""What a worker of a straight pipeline holds at its peak, counted once per backward after the play.

Between backwards it only grows: by what arrives, and by what forwards and a recomputation leave. So at the
end of each backward, before it frees anything, a worker holds the most since the backward before. What its
forwards and the recomputation held while they ran is looked at one by one only where, had all come by then
that came until the backward's end, it could be a new peak.
"""

from __future__ import annotations

from ..pipeline.flat import AHEAD, BACKWARD, FORWARD, OTHER_ROOM, OWNER, ROOM, Cells
from .records import (
    ADDED_BYTES,
    AGAIN,
    ALL,
    BACK,
    BACKWARDS,
    BACKWARDS_COUNTED,
    BRIEF,
    FORWARDS,
    FORWARDS_COUNTED,
    GRADIENT_BYTES,
    GRADIENTS_SEEN,
    INPUT_BYTES,
    INPUTS_SEEN,
    KEPT,
    PEAK,
    RECOMPUTED,
    RESIDENT,
    RUNNING_BYTES,
    SOME,
)


def count_memory(
    cells: Cells, orders: Cells, hop: int, num_inputs: int, num_gradients: int, until: int
) -> None:
    """Count on through the backwards of a hop's worker that have ended by then. So many inputs and gradients
    are known; no other comes before."""
    worker = cells[hop + OWNER]
    inputs, gradients = cells[hop + ROOM], cells[hop + OTHER_ROOM]
    forwards, backwards, ended = cells[worker + FORWARD], cells[worker + BACKWARD], cells[worker + FORWARDS]
    forward, backward = cells[worker + FORWARDS_COUNTED], cells[worker + BACKWARDS_COUNTED]
    came, returned = cells[hop + INPUTS_SEEN], cells[hop + GRADIENTS_SEEN]
    resident, peak, end = cells[worker + RESIDENT], cells[worker + PEAK], cells[worker + BACKWARDS]
    input_bytes, gradient_bytes = cells[hop + INPUT_BYTES], cells[hop + GRADIENT_BYTES]
    again_bytes, freed_bytes = cells[hop + ADDED_BYTES + AGAIN], -cells[hop + ADDED_BYTES + BACK]
    running_bytes, beyond_bytes = cells[hop + RUNNING_BYTES + BACK], _beyond(cells, hop)
    beyond_again_bytes = max(beyond_bytes, cells[hop + RUNNING_BYTES + AGAIN])
    recomputed = cells[worker + RECOMPUTED]
    left_bytes = cells[hop + ADDED_BYTES + (BRIEF if recomputed == ALL else KEPT)]
    while backward < end and cells[backwards + backward] <= until:
        stop, begun, seen, seen_back = cells[backwards + backward], forward, came, returned
        forward = _past(cells, forwards, forward, ended, stop)
        # A forward's input has come before it ended, and a backward's gradient.
        came = _past(cells, inputs, max(came, forward), num_inputs, stop)
        returned = _past(cells, gradients, max(returned, backward + 1), num_gradients, stop)
        most = resident + (came - seen) * input_bytes + (returned - seen_back) * gradient_bytes
        if recomputed == SOME:
            most += _left(cells, orders, hop, forwards + begun, forwards + forward)
        else:
            most += (forward - begun) * left_bytes
        possible = most + beyond_bytes
        if recomputed == ALL or (recomputed == SOME and orders[backwards + backward] & 1):
            possible, most = most + beyond_again_bytes, most + again_bytes
        peak = max(peak, most + running_bytes)
        if possible > peak:
            cells[worker + FORWARDS_COUNTED], cells[worker + BACKWARDS_COUNTED] = begun, backward
            cells[hop + INPUTS_SEEN], cells[hop + GRADIENTS_SEEN] = seen, seen_back
            peak = max(peak, resident + _most_before(cells, orders, hop, forward, came, returned))
        resident = most - freed_bytes
        backward += 1
    cells[hop + INPUTS_SEEN], cells[hop + GRADIENTS_SEEN] = came, returned
    cells[worker + FORWARDS_COUNTED], cells[worker + BACKWARDS_COUNTED] = forward, backward
    cells[worker + RESIDENT], cells[worker + PEAK] = resident, peak


def _past(cells: Cells, start: int, entry: int, end: int, stop: int) -> int:
    """The first of the entries from one on that is not before a moment."""
    while entry < end and cells[start + entry] < stop:
        entry += 1
    return entry


def _left(cells: Cells, orders: Cells, hop: int, first: int, end: int) -> int:
    """What forwards leave that stand from one cell of the orders to another."""
    size_bytes = 0
    for place in range(first, end):
        size_bytes += cells[hop + ADDED_BYTES + (orders[place] & 1)]
    return size_bytes


def _beyond(cells: Cells, hop: int) -> int:
    """The most that a forward holds while it runs, beyond what it leaves."""
    running, added = hop + RUNNING_BYTES, hop + ADDED_BYTES
    return max(cells[running + KEPT] - cells[added + KEPT], cells[running + BRIEF] - cells[added + BRIEF])


def _most_before(
    cells: Cells, orders: Cells, hop: int, num_forwards: int, num_inputs: int, num_gradients: int
) -> int:
    """The most by which a worker's bytes grow while it runs what comes before its next backward that is not
    counted: forwards up to one, and the recomputation. By the backward's end so many messages have come."""
    worker = cells[hop + OWNER]
    forwards, backward = cells[worker + FORWARD], cells[worker + BACKWARDS_COUNTED]
    came, returned = cells[hop + INPUTS_SEEN], cells[hop + GRADIENTS_SEEN]
    resident, most = 0, 0
    again = orders[cells[worker + BACKWARD] + backward] & 1
    for forward in range(cells[worker + FORWARDS_COUNTED], num_forwards + again):
        what, stop = AGAIN, cells[cells[worker + AHEAD] + backward]
        if forward < num_forwards:
            what, stop = orders[forwards + forward] & 1, cells[forwards + forward]
        resident -= came * cells[hop + INPUT_BYTES] + returned * cells[hop + GRADIENT_BYTES]
        came = _past(cells, cells[hop + ROOM], came, num_inputs, stop)
        returned = _past(cells, cells[hop + OTHER_ROOM], returned, num_gradients, stop)
        resident += came * cells[hop + INPUT_BYTES] + returned * cells[hop + GRADIENT_BYTES]
        most = max(most, resident + cells[hop + RUNNING_BYTES + what])
        resident += cells[hop + ADDED_BYTES + what]
    return most
