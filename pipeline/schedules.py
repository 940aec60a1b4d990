"""The order of operations on each worker, for GPipe, 1F1B and Varuna."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .arrays import (
    NONE,
    Array,
    Arrays,
    Entry,
    ForwardTurn,
    Hop,
    StaticOrder,
    Worker,
    action_of,
    hop_of,
    lay_out,
)
from .components import Component, components
from .gpipe import gpipe
from .list_schedule import ListHop, ListWorker, Queued, list_schedule
from .operations import Kind, Operation
from .plan import Plan, Schedule
from .policy import BACKWARD, FORWARD, FORWARD_DISCARD, INPUT, RECOMPUTE, WEIGHT

Orders = tuple[tuple[Operation, ...], ...]
"""The operations of each worker, in rank order, in the order in which they run."""


class InvalidOrder(ValueError):
    """An order of operations that a worker cannot follow; the message names the place."""


def orders(plan: Plan, only: Collection[int] | None = None) -> Orders:
    """Each worker's operations in the order of `plan.schedule`; each operation of the plan occurs once.

    `only`: the workers whose orders are wanted, by default all; the orders of the others are empty. That
    saves the time of writing them down, and of scheduling components that have none of these workers.

    Varuna and 1F1B are list schedules in unit time (F = R = 1, B = 2, I = W = 1; see
    `makara.pipeline.list_schedule`). A plan's `window` bounds the micro-batches in flight on each worker,
    except where crossing paths would then deadlock. GPipe keeps to it by draining the pipeline each time the
    window is full. With recomputation, R precedes its B directly, and the last hop of a path has none (§3.2);
    only GPipe recomputes there too, as in Figure 4 (b), except for the micro-batch whose forward was last. A
    hop whose sections are all frozen has no R and no halves under any schedule, and its B takes one unit.

    `plan.Schedule` says how to add a schedule.
    """
    wanted = frozenset(range(plan.num_workers) if only is None else only)
    per_worker: list[tuple[Operation, ...]] = [()] * plan.num_workers
    solved: dict[object, StaticOrder] = {}
    for component in components(plan):
        if wanted.isdisjoint(component.workers):
            continue
        key = component.signature
        if key is None or key not in solved:
            solved[key] = static_order(plan, component)
        for worker, tasks in _tasks(component, solved[key], wanted):
            per_worker[worker] = tasks
    return tuple(per_worker)


@dataclass(frozen=True, slots=True)
class Lister:
    """`list_schedule`, interpreted or compiled, and the arrays of records that it takes."""

    list_schedule: Callable[..., None]
    arrays: Arrays


def _set_attributes(records: Array[Any], name: str, values: Sequence[int]) -> None:
    for record, value in zip(records, values, strict=True):
        setattr(record, name, value)


INTERPRETED = Lister(
    list_schedule,
    Arrays(
        array=lambda record, values: list(values),
        make=lambda record, length: [record() for _ in range(length)],
        read=lambda record, array: array,
        column=lambda array, name: [getattr(record, name) for record in array],
        set_column=_set_attributes,
    ),
)


def static_order(plan: Plan, component: Component, lister: Lister = INTERPRETED) -> StaticOrder:
    """Compute the orders of a component's workers under the plan's schedule."""
    workers, hops = lay_out(component, ListWorker, ListHop)
    num_entries = sum(worker.num_entries for worker in workers)
    made = lister.arrays
    micro_batches = [micro_batch for path in component.paths for micro_batch in path.micro_batches]
    match plan.schedule:
        case Schedule.GPIPE:
            entries = [Entry() for _ in range(num_entries)]
            turns = [ForwardTurn(micro_batch) for micro_batch in micro_batches]
            gpipe(workers, hops, turns, entries, window=component.window, recompute=plan.recompute)
            return StaticOrder(made.array(ForwardTurn, turns), made.array(Entry, entries), ())
        case Schedule.VARUNA | Schedule.ONE_F_ONE_B:
            _set_rules(plan, component.window, hops)
    listed, turns = made.array(ListWorker, workers), made.make(ForwardTurn, len(micro_batches))
    made.set_column(turns, "micro_batch", micro_batches)
    entries, queued = made.make(Entry, num_entries), made.make(Queued, num_entries)
    lister.list_schedule(listed, made.array(ListHop, hops), turns, entries, queued)
    return StaticOrder(turns, entries, made.column(listed, "most_in_flight"))


def _set_rules(plan: Plan, window: int | None, hops: Sequence[ListHop]) -> None:
    """Set each hop's bound on micro-batches in flight, and whether it recomputes."""
    num_left = 0
    for hop in reversed(hops):
        is_last = hop.after == NONE
        num_left = 1 if is_last else num_left + 1
        limit = num_left if plan.schedule.limits_itself else sys.maxsize
        hop.window = limit if window is None else min(limit, window)
        hop.recomputes = int(plan.recompute and not is_last and not hop.is_frozen)


def _tasks(
    component: Component, order: StaticOrder, wanted: Collection[int]
) -> Iterator[tuple[int, tuple[Operation, ...]]]:
    """(worker, its operations) for those of the component's workers that are wanted."""
    workers, _ = lay_out(component, Worker, Hop)
    stages = [(path, stage) for path in component.paths for stage in range(len(path.hops))]
    forwards = [iter(path.micro_batches) for path, _ in stages]
    taken_back = _taken_back(component, order)
    backwards, weights = [iter(taken) for taken in taken_back], [iter(taken) for taken in taken_back]
    left = {
        Kind.FORWARD: forwards,
        Kind.BACKWARD: backwards,
        Kind.INPUT: backwards,
        Kind.WEIGHT: weights,
    }
    for rank, worker in zip(component.by_first_visit, workers, strict=True):
        if rank not in wanted:
            continue
        tasks: list[Operation] = []
        for number in _in_order(order.entries[worker.first_entry : worker.first_entry + worker.num_entries]):
            hop, kind = hop_of(number), _KINDS[action_of(number)]
            stage, micro_batch = stages[hop][1], next(left[kind][hop])
            if action_of(number) == RECOMPUTE:
                tasks.append(Operation(stage, Kind.RECOMPUTE, micro_batch))
            tasks.append(Operation(stage, kind, micro_batch))
        yield rank, tuple(tasks)


_KINDS = {
    FORWARD: Kind.FORWARD,
    FORWARD_DISCARD: Kind.FORWARD,
    RECOMPUTE: Kind.BACKWARD,  # of which it is the beginning
    BACKWARD: Kind.BACKWARD,
    INPUT: Kind.INPUT,
    WEIGHT: Kind.WEIGHT,
}


def _in_order(entries: Sequence[Entry]) -> Iterator[int]:
    """A worker's operations, as `arrays.operation` numbers them; a RECOMPUTE stands for its BACKWARD, too."""
    others: list[int] = []
    num_forwards = 0
    for entry in entries:
        others += [ahead.forward for ahead in entries[num_forwards : entry.forwards_before]]
        others.append(entry.backward)
        num_forwards = entry.forwards_before
    weights = deque(entry for entry in entries if entry.weight != NONE)
    for place in range(len(others) + 1):
        while weights and weights[0].weight_place == place:
            yield weights.popleft().weight
        if place < len(others):
            yield others[place]


def _taken_back(component: Component, order: StaticOrder) -> list[list[int]]:
    """For each hop, its micro-batches in the order of their backwards."""
    result: list[list[int]] = []
    first = 0
    for path in component.paths:
        places = [turn.backwards_before for turn in order.turns[first : first + len(path.micro_batches)]]
        first += len(places)
        taken = [micro_batch for _, micro_batch in sorted(zip(places, path.micro_batches, strict=True))]
        result += [taken] * len(path.hops)
    return result
