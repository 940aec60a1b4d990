"""Static orders, ready for a play. Those of lone paths hang on nothing but a plan's shape: they are kept."""

from __future__ import annotations

from collections.abc import Hashable

from ..pipeline import Component, Plan, Schedule
from ..pipeline.flat import SIZE, WORKER_SIZE, WORKERS, WORKERS_END, Cells, flatten
from ..pipeline.schedules import prepare_order, write_order
from .code import Code
from .pricing import SIZES, cells_for
from .records import NEVER, WINDOW


def prepared(plan: Plan, component: Component, capacity: int, code: Code) -> Cells:
    """Orders, windows, and rooms that are empty; nobody may write into these cells.

    On a lone path there is room for as many micro-batches as `capacity`.
    """
    if component.signature is None:
        return _prepare(plan, component, capacity, code)
    key: Hashable = (component.signature, capacity, plan.schedule, plan.window, plan.recompute)
    kept = code.shelf.get(key)
    if kept is None:
        kept = _prepare(plan, component, capacity, code)
        code.shelf.put(key, kept)
    return kept


def records_of(component: Component, capacity: int) -> list[int]:
    is_lone = len(component.paths) == 1
    return flatten(component, SIZES, more=cells_for(component), capacity=capacity if is_lone else None)


def _prepare(plan: Plan, component: Component, capacity: int, code: Code) -> Cells:
    records = records_of(component, capacity)
    prepare_order(plan, records)
    cells = code.scheduler.hold(records, records[SIZE])
    write_order(plan, cells, code.scheduler)
    for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
        cells[worker + WINDOW] = NEVER if plan.window is None else plan.window
        if plan.schedule is Schedule.ONE_F_ONE_B:
            # Bounded memory is the point of 1F1B: running ahead may not exceed what its own order needs.
            cells[worker + WINDOW] = min(cells[worker + WINDOW], code.most_in_flight(cells, worker))
    code.empty_rooms(cells)
    return cells
