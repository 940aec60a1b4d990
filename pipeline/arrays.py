"""The workers, hops and micro-batches of a component as arrays of records.

Code that runs once for each operation of a step (the list schedule here, the simulator's engine) is written
once, over arrays of records: lists of the objects below in interpreted code, two-dimensional numpy arrays
with the same named columns in compiled code. So a record holds only integers, and refers to another record by
its index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .components import Component
from .policy import WEIGHT

NONE = -1  # instead of an index: there is no such record

Record = TypeVar("Record")
Array = Sequence[Record]
"""A list of records, or an array with their fields as columns."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Functions that make and read arrays of records: of interpreted code, or of compiled code."""

    array: Callable[[type[Any], Sequence[Any]], Array[Any]]
    make: Callable[[type[Any], int], Array[Any]]
    """Makes an array of that many records with default values."""
    read: Callable[[type[Any], Array[Any]], Sequence[Any]]
    column: Callable[[Array[Any], str], Sequence[int]]
    """Reads one field of all records."""
    set_column: Callable[[Array[Any], str, Sequence[int]], None]


@dataclass(slots=True)
class Worker:
    first_hop: int = NONE
    """Index of its first hop; `next_here` of each hop gives the next one."""
    first_entry: int = 0
    """Index of its first `Entry`; it has `num_entries` of them, one for each forward-backward pair."""
    num_entries: int = 0


@dataclass(slots=True)
class Hop:
    worker: int = NONE
    before: int = NONE
    """The hop before it on the path, and the one after."""
    after: int = NONE
    next_here: int = NONE
    """The next hop on the same worker."""
    enters: int = 0
    """1 at the path's first visit to the worker, from whose forward its micro-batches count against the
    window."""
    leaves: int = 0
    """1 where they cease to: at the WEIGHT of the path's first hop on the worker that has one, for that is
    the last of them; if none has one, at the BACKWARD of its first visit."""
    is_frozen: int = 0
    """1 if its sections get no gradient, so its backward computes nothing."""
    is_split: int = 0
    """1 if its backwards are an INPUT and a WEIGHT each."""
    num_turns: int = 0
    """Number of micro-batches on the path."""
    first_turn: int = 0
    """Index of the path's first `ForwardTurn`; the same for all hops of a path."""


@dataclass(slots=True)
class ForwardTurn:
    """One micro-batch of a path, in the order of forwards."""

    micro_batch: int = 0
    backwards_before: int = 0
    """Number of the path's micro-batches whose backward comes earlier; the same on all hops."""


@dataclass(slots=True)
class Entry:
    """The k-th forward and the k-th backward of a worker's static order.

    R stands directly before its B, so the number of forwards before each backward gives their order.
    """

    forward: int = 0
    """The forward, as `operation` numbers it: `FORWARD` or `FORWARD_DISCARD`."""
    backward: int = 0
    """The `BACKWARD` or `INPUT`, or the `RECOMPUTE` before it."""
    forwards_before: int = 0
    weight: int = NONE
    """The k-th `WEIGHT`. They are in the order of their `INPUT`; `weight_place` is the number of forwards and
    backwards before it."""
    weight_place: int = 0


@dataclass(frozen=True, slots=True)
class StaticOrder:
    """The orders of a component's workers; `most_in_flight` is each worker's peak if it follows its order."""

    turns: Array[ForwardTurn]
    entries: Array[Entry]
    most_in_flight: Sequence[int]


NUM_ACTIONS = WEIGHT + 1


def operation(hop: int, action: int) -> int:
    """One number for (hop, action); `hop_of` and `action_of` decode it."""
    return NUM_ACTIONS * hop + action


def hop_of(operation: int) -> int:
    return operation // NUM_ACTIONS


def action_of(operation: int) -> int:
    return operation % NUM_ACTIONS


AnyWorker = TypeVar("AnyWorker", bound=Worker)
AnyHop = TypeVar("AnyHop", bound=Hop)


def lay_out(
    component: Component, worker_type: type[AnyWorker], hop_type: type[AnyHop]
) -> tuple[list[AnyWorker], list[AnyHop]]:
    """A component as records: its workers in the order of `by_first_visit`, its hops path by path."""
    index_of = {worker: index for index, worker in enumerate(component.by_first_visit)}
    workers = [worker_type() for _ in index_of]
    hops: list[AnyHop] = []
    first_turn = 0
    for path in component.paths:
        visited: set[int] = set()
        for stage, taken in enumerate(path.hops):
            is_frozen = component.is_frozen(path, taken)
            hop = hop_type(
                worker=index_of[taken.worker],
                before=len(hops) - 1 if stage else NONE,
                after=len(hops) + 1 if stage + 1 < len(path.hops) else NONE,
                enters=int(taken.worker not in visited),
                is_frozen=int(is_frozen),
                is_split=int(component.has_halves and not is_frozen),
                num_turns=len(path.micro_batches),
                first_turn=first_turn,
            )
            visited.add(taken.worker)
            hops.append(hop)
        _set_leaves(hops[len(hops) - len(path.hops) :])
        first_turn += len(path.micro_batches)
    for index, hop in reversed(list(enumerate(hops))):
        worker = workers[hop.worker]
        hop.next_here, worker.first_hop = worker.first_hop, index
        worker.num_entries += hop.num_turns
    ends = itertools.accumulate(worker.num_entries for worker in workers)
    for worker, end in zip(workers, ends, strict=True):
        worker.first_entry = end - worker.num_entries
    return workers, hops


def _set_leaves(path: Sequence[Hop]) -> None:
    leaving: dict[int, Hop] = {}
    for hop in path:
        before = leaving.get(hop.worker)
        if before is None or hop.is_split > before.is_split:
            leaving[hop.worker] = hop
    for hop in leaving.values():
        hop.leaves = 1
