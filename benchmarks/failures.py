"""Planning ahead at the sizes of the papers: SlipStream's failures (table 3), Oobleck's templates (§4)."""

from __future__ import annotations

import time

from makara.morphing import FailurePlan, failure_plans, stage_table, templates
from makara.pipeline import grid
from makara.simulator import warm_up

from .made_up import in_halves, model, stages
from .report import Row
from .timing import timed

DEPTH, REPLICAS, NUM_MICRO_BATCHES = 64, 32, 1024
MOST = DEPTH * REPLICAS // 4
NUM_VMS, DEVICES, SECTIONS = 24, 8, 96
TITLE = (
    f"one core, warm: {REPLICAS} pipelines of {DEPTH} stages, N={NUM_MICRO_BATCHES}, every number "
    f"of failures up to {MOST} (SlipStream: 3,153 s); templates of {NUM_VMS} VMs of {DEVICES} devices"
)


def rows() -> list[Row]:
    warm_up()
    return [row for halves in (False, True) for row in _failures(halves)] + _templates()


def _failures(halves: bool) -> list[Row]:
    calibration = in_halves(model((0.01,) * DEPTH))
    plan = grid(stages(DEPTH, DEPTH), REPLICAS, NUM_MICRO_BATCHES, window=2 * DEPTH, halves=halves)
    failure_plans(plan, calibration, MOST)
    seconds, found = timed(lambda: failure_plans(plan, calibration, MOST), time.process_time)
    worst = max(found, key=lambda one: one.gap)
    return [_row(found, number, halves, seconds, worst.gap) for number in (0, 1, *range(64, MOST + 1, 64))]


def _row(found: tuple[FailurePlan, ...], number: int, halves: bool, seconds: float, worst: float) -> Row:
    one = found[number]
    return {
        "backwards": "halves" if halves else "whole",
        "failures": number,
        "pipelines s": one.pipeline_s,
        "bound s": one.bound_s,
        "gap %": 100 * one.gap,
        "worst gap % of all numbers": 100 * worst,
        "all numbers, CPU s": seconds,
    }


def _templates() -> list[Row]:
    table = stage_table(model((0.01,) * SECTIONS))
    sizes = (4 * NUM_VMS, NUM_VMS, DEVICES, 80 << 30)
    templates(table, *sizes)
    seconds, found = timed(lambda: templates(table, *sizes), time.process_time)
    return [{"templates of up to VMs": NUM_VMS, "found": len(found), "sections": SECTIONS, "CPU s": seconds}]
