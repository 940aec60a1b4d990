"""Thirteen workers and a model that needs four: unequal pipelines beside the best grid (Oobleck §4).

Both plans are chosen as a job's are, from one calibration, and run in turns on the same emulated workers.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from makara.morphing import Choice, stage_table
from makara.morphing.stages import WHOLE, Mode
from makara.simulator import Calibration

from .emulated.fleet import Fleet, Measured, fleet, in_fresh_process
from .emulated.measuring import calibrated, planner_on
from .emulated.models import SCALE, Emulated, transformer, uneven
from .predictions import FLAT
from .report import Row

NUM_WORKERS = 13
NEEDED = 4
"""The fewest workers that the model fits on."""
NUM_MICRO_BATCHES = 52
STEPS, ROUNDS = 3, 2
MODELS = (transformer(0.024, num_sections=20), uneven(0.012, num_pairs=9))
TITLE = (
    f"a step of {NUM_WORKERS} emulated workers and {NUM_MICRO_BATCHES} micro-batches, of a model that needs "
    f"at least {NEEDED}; operations asleep for 12 ms and more, tensors and link rates times {SCALE:g}"
)


def rows() -> list[Row]:
    return [row for model in MODELS for row in in_fresh_process(_rows_of, model)]


def _rows_of(model: Emulated) -> list[Row]:
    with fleet(model, NUM_WORKERS, NUM_MICRO_BATCHES) as workers:
        calibration = calibrated(workers)
        planner = planner_on(workers, FLAT, calibration)
        planner = replace(planner, memory_bytes=_memory_bytes(calibration))
        choices = [planner.choose(recompute="auto", unequal=unequal) for unequal in (True, False)]
        measured = [_run(workers, choice) for _ in range(ROUNDS) for choice in choices]
    steps_s = [_step_s(measured[number :: len(choices)]) for number in range(len(choices))]
    return [
        {
            "model": model.name,
            "plan": choice.plan.shape,
            "workers": choice.plan.num_workers,
            "predicted s": (predicted_s := planner.predicted_s(choice)),
            "measured s": step_s,
            "error %": 100 * (predicted_s / step_s - 1),
            "throughput / best grid's": steps_s[-1] / step_s,
            "predicted throughput / best grid's": planner.predicted_s(choices[-1]) / predicted_s,
        }
        for choice, step_s in zip(choices, steps_s, strict=True)
    ]


def _run(workers: Fleet, choice: Choice) -> Measured:
    return workers.run(choice.plan, FLAT, STEPS, workers=choice.workers)


def _step_s(runs: list[Measured]) -> float:
    return statistics.median(step_s for run in runs for step_s in run.steps_s)


def _memory_bytes(calibration: Calibration) -> int:
    """The most memory with which `NEEDED - 1` stages never fit: one of them has at least so many sections."""
    table = stage_table(calibration)
    most = -(-table.num_sections // (NEEDED - 1))
    starts, modes = range(table.num_sections - most + 1), (WHOLE, Mode(recompute=True))
    return min(table.memory(at, at + most, mode).least_bytes for at in starts for mode in modes) - 1
