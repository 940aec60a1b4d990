"""Predicted against measured steps, for plans that the calibration has not seen (see docs/predictions.md).

Before anything is predicted, all workers of an emulated cluster calibrate as single workers, the executor's
costs are measured on pipelines of three, and all-reduces on rings of several sizes. Then plans run, for real.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .emulated.cases import Planner
from .emulated.fleet import Fleet, fleet, in_fresh_process
from .emulated.measuring import calibrated, planner_on
from .emulated.models import SCALE, Emulated, transformer, uneven
from .emulated.networks import Network
from .report import Row
from .wires import Emulation

TITLE = (
    "a step of emulated workers; operations asleep for 18 ms and more, everything else real; "
    f"tensors and link rates times {SCALE:g}"
)
NUM_WORKERS = 24
NUM_MICRO_BATCHES = 24
STEPS = 5
FLAT = Network("10 Gbit/s", Emulation(bytes_per_s=1.25e9, latency_s=100e-6, jitter_s=0.0))
RACKS = Network(
    "5 Gbit/s, jitter 2 ms, VMs of 4",
    Emulation(bytes_per_s=0.625e9, latency_s=200e-6, jitter_s=2e-3),
    workers_per_vm=4,
)


@dataclass(frozen=True, slots=True)
class Case:
    network: Network
    depth: int
    replicas: int
    recompute: bool = False


CASES: tuple[tuple[Emulated, tuple[Case, ...]], ...] = (
    (
        transformer(0.030),
        (
            Case(FLAT, 2, 4),
            Case(FLAT, 4, 2),
            Case(FLAT, 3, 5),
            Case(FLAT, 6, 2),
            Case(FLAT, 12, 1),
            Case(FLAT, 6, 4),
            Case(FLAT, 12, 2),
            Case(FLAT, 6, 4, recompute=True),
            Case(RACKS, 4, 6),
            Case(RACKS, 12, 2),
        ),
    ),
    (
        uneven(0.018),
        (
            Case(FLAT, 2, 5),
            Case(FLAT, 5, 2),
            Case(FLAT, 10, 1),
            Case(FLAT, 4, 5),
            Case(FLAT, 10, 2),
            Case(FLAT, 5, 4, recompute=True),
            Case(RACKS, 3, 8),
            Case(RACKS, 8, 3),
        ),
    ),
)


def rows() -> list[Row]:
    found = [row for model, cases in CASES for row in in_fresh_process(_rows_of, model, cases)]
    errors = [abs(float(row["error %"])) for row in found]
    empty: dict[str, str | float] = dict.fromkeys(found[0], "")
    return [
        *found,
        empty | {"model": "mean of errors", "error %": statistics.mean(errors)},
        empty | {"model": "worst", "error %": max(errors)},
    ]


def _rows_of(model: Emulated, cases: tuple[Case, ...]) -> list[Row]:
    with fleet(model, NUM_WORKERS, NUM_MICRO_BATCHES) as workers:
        calibration = calibrated(workers)
        networks = {case.network.name: case.network for case in cases}
        planners = {name: planner_on(workers, network, calibration) for name, network in networks.items()}
        return [_row(model, workers, planners[case.network.name], case) for case in cases]


def _row(model: Emulated, workers: Fleet, planner: Planner, case: Case) -> Row:
    choice = planner.choose(case.depth, case.replicas, recompute="on" if case.recompute else "off")
    predicted_s = planner.predicted_s(choice)
    measured = workers.run(choice.plan, case.network, STEPS, workers=choice.workers)
    return {
        "model": model.name + (", recomputing" if case.recompute else ""),
        "network": case.network.name,
        "PxD": f"{case.depth}x{case.replicas}",
        "predicted s": predicted_s,
        "measured s": measured.step_s,
        "error %": 100 * (predicted_s / measured.step_s - 1),
        "spread %": 100 * measured.spread,
        "CPU idle %": 100 * measured.idle_cpu,
        "own CPU %": 100 * measured.own_cpu,
        "MB/s": measured.bytes_per_s / 1e6,
    }
