"""The order of operations on each worker, for GPipe, 1F1B and Varuna, and its form as a CSV file."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .components import Component, components
from .flat import (
    AFTER,
    AHEAD,
    BACKWARD,
    COUNT,
    FORWARD,
    FROZEN,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    PLACE,
    SIZE,
    TOTAL,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
    flatten,
    is_pipeline,
)
from .listing import LIMIT, LISTING_HOP_SIZE, LISTING_WORKER_SIZE, RECOMPUTES, list_tasks
from .operations import Kind, Operation
from .plan import Plan, Schedule
from .rounds import ROUND_HOP_SIZE, ROUND_WORKER_SIZE, paths_in_turn, round_ends, round_tasks

Orders = tuple[tuple[Operation, ...], ...]
"""For each worker, in rank order, its operations in the order in which they are to run."""


class InvalidOrder(ValueError):
    """An order of operations that no worker could follow; the message names the place."""


def orders(plan: Plan) -> Orders:
    """Each worker's operations in the order of `plan.schedule`; each operation of the plan occurs once.

    Varuna and 1F1B are list schedules in unit time (F = R = 1, B = 2; see `makara.pipeline.listing`). A
    plan's `window` bounds the micro-batches in flight on each worker, except where paths cross in a way that
    would then never finish. GPipe keeps to it by draining the pipeline each time the window is full. With
    recomputation, R precedes its B directly, and the last hop of a path has none (§3.2); GPipe alone, as in
    Figure 4 (b), recomputes there too and skips only the micro-batch whose forward was the last. Hops of
    frozen sections alone have none under any schedule, and their B takes one unit.
    """
    per_worker: list[tuple[Operation, ...]] = [()] * plan.num_workers
    solved: dict[object, Cells] = {}
    for component in components(plan):
        key = component.signature
        if key is None or key not in solved:
            records = flatten(component, RECORDS)
            prepare_order(plan, records)
            solved[key] = INTERPRETED.hold(records, records[SIZE])
            write_order(plan, solved[key], INTERPRETED)
        for worker, tasks in zip(component.by_first_visit, _tasks(component, solved[key]), strict=True):
            per_worker[worker] = tuple(tasks)
    return tuple(per_worker)


RECORDS = (max(LISTING_WORKER_SIZE, ROUND_WORKER_SIZE), max(LISTING_HOP_SIZE, ROUND_HOP_SIZE))
"""Sizes of records with which an order can be written."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The functions that write orders, and what makes cells: of a list, followed by zeros up to a length."""

    hold: Callable[[Sequence[int], int], Cells]
    list_tasks: Callable[[Cells, Cells, bool], None]
    round_tasks: Callable[[Cells, Cells, Cells, int, bool], None]


def _held(values: Sequence[int], length: int) -> list[int]:
    return [*values, *(0 for _ in range(length - len(values)))]


INTERPRETED = Scheduler(_held, list_tasks, round_tasks)


def prepare_order(plan: Plan, records: Cells) -> None:
    """Write the rules into the hops where the schedule is one of lists."""
    if plan.schedule is Schedule.GPIPE:
        return
    left = 0
    for hop in reversed(range(records[HOPS], records[HOPS_END], records[HOP_SIZE])):
        is_last = not records[hop + AFTER]
        left = 1 if is_last else left + 1
        limit = left if plan.schedule is Schedule.ONE_F_ONE_B else sys.maxsize
        records[hop + LIMIT] = limit if plan.window is None else min(limit, plan.window)
        records[hop + RECOMPUTES] = int(plan.recompute and not is_last and not records[hop + FROZEN])


def write_order(plan: Plan, cells: Cells, scheduler: Scheduler, *, may_skip: bool = True) -> None:
    """The orders of the workers of a component. `may_skip`: periods may be copied (see `listing`)."""
    if plan.schedule is Schedule.GPIPE:
        turns = paths_in_turn(cells)
        ends = round_ends(cells, turns, plan.window)
        in_turn, ended = scheduler.hold(turns, len(turns)), scheduler.hold(ends, len(ends))
        scheduler.round_tasks(cells, in_turn, ended, len(ends), plan.recompute)
    else:
        mark = scheduler.hold((), cells[HOPS_END])
        scheduler.list_tasks(cells, mark, may_skip and is_pipeline(cells))


def _tasks(component: Component, cells: Cells) -> list[list[Operation]]:
    """The operations of the component's workers, as in `by_first_visit`."""
    hops = range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE])
    stages = [(path, stage) for path in component.paths for stage in range(len(path.hops))]
    forwards: dict[int, list[tuple[int, int]]] = {}  # by hop: (stage, micro-batch), the next one last
    backwards: dict[int, list[tuple[int, int]]] = {}
    for hop, (path, stage) in zip(hops, stages, strict=True):
        forwards[hop] = [(stage, micro_batch) for micro_batch in reversed(path.micro_batches)]
        placed = sorted((cells[cells[hop + PLACE] + turn], turn) for turn in range(cells[hop + COUNT]))
        backwards[hop] = [(stage, path.micro_batches[turn]) for _, turn in reversed(placed)]
    result: list[list[Operation]] = []
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        tasks: list[Operation] = []
        forward = cells[worker + FORWARD]
        for entry in range(cells[worker + TOTAL]):
            while forward < cells[worker + FORWARD] + cells[cells[worker + AHEAD] + entry]:
                stage, micro_batch = forwards[cells[forward] >> 1].pop()
                tasks.append(Operation(stage, Kind.FORWARD, micro_batch))
                forward += 1
            code = cells[cells[worker + BACKWARD] + entry]
            stage, micro_batch = backwards[code >> 1].pop()
            if code & 1:
                tasks.append(Operation(stage, Kind.RECOMPUTE, micro_batch))
            tasks.append(Operation(stage, Kind.BACKWARD, micro_batch))
        result.append(tasks)
    return result


def to_csv(orders: Orders, *, recompute: bool = True) -> str:
    """One row per rank, as `torch.distributed.pipelining` reads its compute-only schedules.

    PyTorch knows no R (it recomputes inside the module); `recompute=False` leaves it out for that reader.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for listed in orders:
        writer.writerow([str(task) for task in listed if recompute or task.kind is not Kind.RECOMPUTE])
    return text.getvalue()


def from_csv(text: str) -> Orders:
    """Reads what `to_csv` wrote; empty cells are idle time and are skipped.

    Raises `InvalidOrder` naming row and column (from 1) of a cell that is no operation or that repeats one.
    """
    seen: dict[Operation, str] = {}
    result: list[tuple[Operation, ...]] = []
    for row, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        listed: list[Operation] = []
        for column, cell in enumerate(cells, start=1):
            if not cell.strip():
                continue
            place = f"row {row}, column {column}"
            try:
                task = Operation.parse(cell)
            except ValueError as error:
                raise InvalidOrder(f"{place}: {error}") from error
            if task in seen:
                raise InvalidOrder(f"{place}: {task} occurs already in {seen[task]}")
            seen[task] = place
            listed.append(task)
        result.append(tuple(listed))
    return tuple(result)
