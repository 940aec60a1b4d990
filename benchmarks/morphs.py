"""From a death to the next finished operation, by how the survivors go on: real trainers, six on loopback.

The benchmark plays the manager: it gives the orders and reads the reports. Rerouted, nothing moves; the
fastest grid of the survivors loads what it lacks from peers; where the dead worker alone hosted a stage, all
go back to the newest checkpoint.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from makara.protocol.messages import Formed, Phase

from .cluster import Cluster
from .report import Row
from .trainers import job_settings

NUM_WORKERS = 6
NUM_MICRO_BATCHES = 18
MICROBATCH_SIZE = 4
ROUNDS = 3
VICTIM = 3
STEPS_BEFORE = 2
"""That a generation takes before a worker dies."""
TITLE = (
    f"one of {NUM_WORKERS} real trainers dies: seconds until the next finished operation, medians of {ROUNDS}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """`depth` of the grid that loses a worker, and whether the survivors are rerouted."""

    name: str
    depth: int
    is_rerouted: bool
    rung: str


CASES = (
    Case("rerouted", 3, is_rerouted=True, rung="peers"),
    Case("fastest grid, from peers", 3, is_rerouted=False, rung="peers"),
    Case("fastest grid, from the store", NUM_WORKERS, is_rerouted=False, rung="store"),
)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = job_settings(
            "morph_models:chain",
            folder,
            MICROBATCH_SIZE,
            NUM_MICRO_BATCHES,
            steps=1_000_000,
            numerics="fast",
            checkpoint_interval_steps=2,
        )
        cluster = Cluster(Path(folder), stack, job, NUM_WORKERS)
        taken: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
        plans: dict[Case, str] = {}
        for _ in range(ROUNDS):
            for case in CASES:
                plans[case], seconds = _lose_one(cluster, case)
                taken[case].append(seconds)
        return [
            {
                "the survivors": case.name,
                "plans": plans[case],
                **{name: statistics.median(one[name] for one in taken[case]) for name in taken[case][0]},
            }
            for case in CASES
        ]


def _lose_one(cluster: Cluster, case: Case) -> tuple[str, dict[str, float]]:
    """What the plans were, and seconds by phase. The dead trainer is replaced."""
    whole = cluster.whole(case.depth)
    number = whole.generation
    cluster.form(whole, cluster.trainers, abandoned=0)
    started_at = cluster.wait_formed(cluster.trainers, number)[0].step
    first = cluster.trainers[0]
    first.wait(lambda report: report.step >= started_at + STEPS_BEFORE)
    began = time.monotonic()
    cluster.trainers[VICTIM].kill()
    first.wait(lambda report: report.phase is Phase.BROKEN)
    noticed = time.monotonic()
    plan, members = (cluster.rerouted if case.is_rerouted else cluster.fastest)(whole, VICTIM)
    planned = time.monotonic()
    prepared, opened = cluster.form(plan, members, abandoned=number)
    reports = cluster.wait_formed(members, plan.generation)
    assert {one.rung for one in reports} == {case.rung}, reports
    formed = time.monotonic()
    forwarded = min(
        cluster.wait_moments(one, "forwarded", plan.generation)[0] for one in members[: plan.num_workers]
    )
    first.wait(lambda report: report.step > reports[0].step)
    stepped = time.monotonic()
    cluster.replace([VICTIM])
    return f"{whole.shape} to {plan.shape}", {
        "noticed s": noticed - began,
        "planned s": planned - noticed,
        "prepared s": prepared - planned,
        "opened s": opened - prepared,
        **_slowest(reports),
        "formed s": formed - opened,
        "first operation s": forwarded - opened,
        "from death to first operation s": forwarded - began,
        "from death to first step s": stepped - began,
    }


def _slowest(formed: Sequence[Formed]) -> dict[str, float]:
    """Seconds of each phase of joining, of the member that took longest."""
    return {f"{name} s": max(one.phases_s[name] for one in formed) for name in formed[0].phases_s}
