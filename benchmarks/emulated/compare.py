"""`python -m benchmarks.emulated.compare MODEL P D`: one plan's operations, simulated beside measured."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from makara.pipeline import Kind
from makara.simulator import Span, simulate

from ..predictions import CASES, FLAT, NUM_MICRO_BATCHES
from ..report import Row, show
from .cases import Planner
from .fleet import fleet, in_fresh_process
from .measuring import calibrated, sums_on
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
        calibration, sums = calibrated(workers), tuple(sums_on(workers, FLAT))
        planner = Planner(calibration, FLAT, sums, workers.names, NUM_MICRO_BATCHES)
        choice = planner.choose(depth, replicas)
        measured = workers.run(choice.plan, FLAT, 1, workers=choice.workers, record=True)
    vm_of = [planner.vm_of(worker) for worker in choice.workers]
    step = simulate(choice.plan, planner.on_network, vm_of=vm_of)
    found: list[Row] = []
    for rank, report in enumerate(measured.reports):
        began = report.applied_at[-2]
        ran = [
            _Ran(entry.operation.kind, entry.operation.micro_batch, entry.began - began, entry.ended - began)
            for entry in report.ran
        ]
        planned = [_of(span) for span in step.timeline if span.worker == rank]
        found.append(_row(rank, planned, ran, step.time_s, report.applied_at[-1] - began))
    return found


@dataclass(frozen=True, slots=True)
class _Ran:
    kind: Kind
    micro_batch: int
    began_s: float
    ended_s: float


def _of(span: Span) -> _Ran:
    return _Ran(span.operation.kind, span.operation.micro_batch, span.start_s, span.stop_s)


def _row(rank: int, planned: Sequence[_Ran], ran: Sequence[_Ran], planned_s: float, took_s: float) -> Row:
    differs = next(
        (
            number
            for number, (one, other) in enumerate(zip(planned, ran, strict=True))
            if (one.kind, one.micro_batch) != (other.kind, other.micro_batch)
        ),
        None,
    )
    row: dict[str, str | int] = {
        "worker": rank,
        "order": "the same" if differs is None else f"differs from operation {differs} on",
        "first begins": _both(planned[0].began_s, ran[0].began_s),
        "last ends": _both(planned[-1].ended_s, ran[-1].ended_s),
        "applied": _both(planned_s, took_s),
    }
    for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
        if any(one.kind is kind for one in ran):
            row[f"mean {kind}"] = _both(_mean_s(planned, kind), _mean_s(ran, kind))
    return row


def _mean_s(operations: Sequence[_Ran], kind: Kind) -> float:
    return statistics.mean(one.ended_s - one.began_s for one in operations if one.kind is kind)


def _both(planned_s: float, measured_s: float) -> str:
    return f"{1e3 * planned_s:.1f} / {1e3 * measured_s:.1f}"


if __name__ == "__main__":
    main()
