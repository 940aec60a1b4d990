"""The order of operations on each worker, for GPipe, 1F1B and Varuna, and its form as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from .components import Component, components
from .listing import Task, list_schedule
from .operations import Kind, Operation
from .plan import Plan, Schedule

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
    Figure 4 (b), recomputes there too and skips only the micro-batch whose forward was the last.
    """
    per_worker: list[list[Operation]] = [[] for _ in range(plan.num_workers)]
    solved: dict[object, list[list[Task]]] = {}
    for part in components(plan):
        key = part.signature
        if key is None or key not in solved:
            tasks = _solve(plan, part)
            if key is not None:
                solved[key] = [tasks[worker] for worker in _by_first_visit(part)]
        else:
            tasks = dict(zip(_by_first_visit(part), solved[key], strict=True))
        for worker, listed in tasks.items():
            per_worker[worker] = _operations(part, listed)
    return tuple(tuple(listed) for listed in per_worker)


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


def _solve(plan: Plan, part: Component) -> dict[int, list[Task]]:
    if plan.schedule is Schedule.GPIPE:
        return _gpipe(part, window=plan.window, recompute=plan.recompute)
    return list_schedule(
        part,
        window=plan.window,
        recompute=plan.recompute,
        limit_to_depth=plan.schedule is Schedule.ONE_F_ONE_B,
    )


def _by_first_visit(part: Component) -> list[int]:
    return list(dict.fromkeys(hop.worker for path in part.paths for hop in path.hops))


def _operations(part: Component, tasks: Sequence[Task]) -> list[Operation]:
    paths = part.paths
    return [Operation(stage, kind, paths[path].micro_batches[index]) for path, stage, kind, index in tasks]


def _gpipe(part: Component, *, window: int | None, recompute: bool) -> dict[int, list[Task]]:
    """All forwards, then all backwards in reverse; one such round for each windowful of micro-batches.

    Both directions follow one order that is the same on all workers, so crossing paths cannot wait in a
    circle.
    """
    tasks: dict[int, list[Task]] = {worker: [] for worker in part.workers}
    for batch in _rounds(part, window):
        fresh = set(part.workers)
        for path, index in batch:
            for stage, hop in enumerate(part.paths[path].hops):
                tasks[hop.worker].append(Task(path, stage, Kind.FORWARD, index))
        for path, index in reversed(batch):
            for stage, hop in reversed(list(enumerate(part.paths[path].hops))):
                if recompute and hop.worker not in fresh:
                    tasks[hop.worker].append(Task(path, stage, Kind.RECOMPUTE, index))
                fresh.discard(hop.worker)
                tasks[hop.worker].append(Task(path, stage, Kind.BACKWARD, index))
    return tasks


def _rounds(part: Component, window: int | None) -> list[list[tuple[int, int]]]:
    """The micro-batches as (path, index on it), ascending, cut so that no worker gets more than `window`."""
    ascending = sorted(
        (micro_batch, path, index)
        for path, taken in enumerate(part.paths)
        for index, micro_batch in enumerate(taken.micro_batches)
    )
    rounds: list[list[tuple[int, int]]] = []
    load: dict[int, int] = {}
    for _, path, index in ascending:
        visited = {hop.worker for hop in part.paths[path].hops}
        if not rounds or (window is not None and any(load[worker] >= window for worker in visited)):
            rounds.append([])
            load = dict.fromkeys(part.workers, 0)
        rounds[-1].append((path, index))
        for worker in visited:
            load[worker] += 1
    return rounds
