"""Static orders, ready for a play. Those of lone paths hang on nothing but a plan's shape: they are kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..pipeline import Component, Plan, Schedule
from ..pipeline.flat import SIZE, WORKER_SIZE, WORKERS, WORKERS_END, Cells, flatten
from ..pipeline.schedules import prepare_order, write_order
from .code import Code
from .pricing import SIZES, cells_for
from .records import NEVER, RECOMPUTED, WINDOW


@dataclass(frozen=True, slots=True)
class Prepared:
    """Nobody may write into either."""

    records: list[int]
    """The cells before the orders, what orders say of a worker among them; nothing has a price yet."""
    orders: Cells
    """All cells; rooms are empty."""


def prepared(plan: Plan, component: Component, capacity: int, code: Code) -> Prepared:
    """The orders of a component. On a lone path there is room for as many micro-batches as `capacity`."""
    if component.signature is None:
        return _prepare(plan, component, capacity, code)
    key = _key(plan, component, capacity)
    kept: Prepared | None = code.shelf.get(key)
    if kept is None:
        kept = _prepare(plan, component, capacity, code)
        code.shelf.put(key, kept, len(kept.records) + len(kept.orders))
    return kept


def left_open(plan: Plan, component: Component, orders: Cells, shorter: Cells, code: Code) -> Cells:
    """Of each worker of a lone path the numbers of the forward and the backward from which on it may do
    otherwise than that of the `shorter` one, which is alike with one micro-batch less."""
    key = (_key(plan, component, 0), "open")
    kept: Cells | None = code.shelf.get(key)
    if kept is None:
        kept = code.scheduler.hold((), 2 * len(component.workers))
        code.find_open(orders, shorter, kept)
        code.shelf.put(key, kept, len(kept))
    return kept


def _key(plan: Plan, component: Component, capacity: int) -> Hashable:
    """Of what the orders of a lone path hang on."""
    return component.signature, capacity, plan.schedule, plan.window, plan.recompute


def _prepare(plan: Plan, component: Component, capacity: int, code: Code) -> Prepared:
    is_lone = len(component.paths) == 1
    records = flatten(component, SIZES, more=cells_for(component), capacity=capacity if is_lone else None)
    listed = list(records)
    prepare_order(plan, listed)
    orders = code.scheduler.hold(listed, records[SIZE])
    write_order(plan, orders, code.scheduler)
    for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
        window = NEVER if plan.window is None else plan.window
        if plan.schedule is Schedule.ONE_F_ONE_B:
            # Bounded memory is the point of 1F1B: running ahead may not exceed what its own order needs.
            window = min(window, code.most_in_flight(orders, worker))
        records[worker + WINDOW] = orders[worker + WINDOW] = window
        records[worker + RECOMPUTED] = orders[worker + RECOMPUTED] = code.recomputed(orders, worker)
    code.empty_rooms(orders)
    return Prepared(records, orders)
