"""`python -m benchmarks.emulated.compare MODEL P D`: one plan's operations, simulated beside measured."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from makara.pipeline import Kind
from makara.simulator import simulate
from makara.worker.execution.costs import Ran

from ..predictions import CASES, FLAT, NUM_MICRO_BATCHES
from ..report import Row, show
from .fleet import fleet, in_fresh_process
from .measuring import calibrated, planner_on
from .models import Emulated


def main() -> None:
    models = {model.name: model for model, _ in CASES}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated.compare", description=__doc__)
    parser.add_argument("model", choices=models)
    parser.add_argument("depth", type=int, metavar="P")
    parser.add_argument("replicas", type=int, metavar="D")
    given = parser.parse_args()
    found = in_fresh_process(rows, models[given.model], given.depth, given.replicas)
    show("compare", "milliseconds after the start of a step, simulated / measured", found)


def rows(model: Emulated, depth: int, replicas: int) -> list[Row]:
    """One row for each worker."""
    count = max(3, depth * replicas)
    with fleet(model, count, NUM_MICRO_BATCHES) as workers:
        planner = planner_on(workers, FLAT, calibrated(workers))
        choice = planner.choose(depth, replicas)
        measured = workers.run(choice.plan, FLAT, 1, workers=choice.workers, record=True)
    vm_of = [planner.vm_of(worker) for worker in choice.workers]
    step = simulate(choice.plan, planner.on_network, vm_of=vm_of)
    found: list[Row] = []
    for rank, report in enumerate(measured.reports):
        began = report.applied_at[-2]
        ran = [replace(entry, began=entry.began - began, ended=entry.ended - began) for entry in report.ran]
        planned = [
            Ran(span.operation, span.start_s, span.stop_s) for span in step.timeline if span.worker == rank
        ]
        found.append(_row(rank, planned, ran, step.time_s, report.applied_at[-1] - began))
    return found


def _row(rank: int, planned: Sequence[Ran], ran: Sequence[Ran], planned_s: float, took_s: float) -> Row:
    differs = next(
        (
            number
            for number, (one, other) in enumerate(zip(planned, ran, strict=True))
            if _what(one) != _what(other)
        ),
        None,
    )
    row: dict[str, str | int] = {
        "worker": rank,
        "order": "the same" if differs is None else f"differs from operation {differs} on",
        "first begins": _both(planned[0].began, ran[0].began),
        "last ends": _both(planned[-1].ended, ran[-1].ended),
        "applied": _both(planned_s, took_s),
    }
    for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
        if any(one.operation.kind is kind for one in ran):
            row[f"mean {kind}"] = _both(_mean_s(planned, kind), _mean_s(ran, kind))
    return row


def _what(one: Ran) -> tuple[Kind, int]:
    """Without the place, which is a stage in a simulation and a section where it ran."""
    return one.operation.kind, one.operation.micro_batch


def _mean_s(operations: Sequence[Ran], kind: Kind) -> float:
    return statistics.mean(one.ended - one.began for one in operations if one.operation.kind is kind)


def _both(planned_s: float, measured_s: float) -> str:
    return f"{1e3 * planned_s:.1f} / {1e3 * measured_s:.1f}"


if __name__ == "__main__":
    main()
