"""A worker dies within a long step: what the rest of the step takes, as simulated and by real trainers.

Nine trainers on loopback, whose operations sleep. One of them is killed after some share of a step; the
others form again and finish the step from what they hold. The step after that one shows what it takes to
begin the step again: it is taken by the same plan.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from makara.manager.replay.step_in_flight import StepsInFlight
from makara.manager.world import Beginning
from makara.pipeline import Plan
from makara.protocol.messages import Phase
from makara.simulator import StepProgress

from .cluster import Cluster
from .report import Row
from .trainers import Trainer, job_settings

DEPTH, REPLICAS, NUM_MICRO_BATCHES = 3, 3, 36
MICROBATCH_SIZE = 4
WINDOW = 2 * DEPTH
VICTIM = 4  # the second stage of the second pipeline
SHARES = (0.2, 0.5, 0.9)
ROUNDS = 3
TITLE = (
    f"one of {DEPTH * REPLICAS} real trainers dies within a step of {NUM_MICRO_BATCHES} micro-batches: "
    f"the rest of the step, medians of {ROUNDS}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """How the survivors go on."""

    name: str
    is_rerouted: bool
    halves: bool


CASES = (
    Case("rerouted", is_rerouted=True, halves=False),
    Case("rerouted, in halves", is_rerouted=True, halves=True),
    Case("fastest grid", is_rerouted=False, halves=False),
)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = job_settings(
            "morph_models:slower_chain",
            folder,
            MICROBATCH_SIZE,
            NUM_MICRO_BATCHES,
            steps=1_000_000,
            numerics="exact",
        )
        cluster = Cluster(Path(folder), stack, job, DEPTH * REPLICAS)
        _take_first_step(cluster)
        cases = list(itertools.product(CASES, SHARES))
        taken: dict[tuple[Case, float], list[dict[str, float]]] = {case: [] for case in cases}
        plans: dict[Case, str] = {}
        for _ in range(ROUNDS):
            for case, share in cases:
                plans[case], found = _lose_one(cluster, case, share)
                taken[case, share].append(found)
    return [
        {
            "the survivors": case.name,
            "plans": plans[case],
            "dies after %": 100 * share,
            **{name: statistics.median(one[name] for one in found) for name in found[0]},
        }
        for (case, share), found in taken.items()
    ]


def _take_first_step(cluster: Cluster) -> None:
    """A job's first step measures scales, and is begun again after a death."""
    cluster.form(cluster.whole(DEPTH), cluster.trainers, abandoned=0)
    cluster.trainers[0].wait(lambda report: report.step >= 1)


def _lose_one(cluster: Cluster, case: Case, share: float) -> tuple[str, dict[str, float]]:
    """What the plans were, and seconds. The dead trainer is replaced."""
    whole = cluster.whole(DEPTH, window=WINDOW, halves=case.halves)
    before = list(cluster.trainers)
    cluster.form(whole, before, abandoned=0)
    step = cluster.wait_formed(before, whole.generation)[0].step
    under_way_s = share * StepProgress(whole, cluster.calibration).time_s
    began = min(cluster.wait_moments(one, "began", whole.generation)[0] for one in before)
    time.sleep(max(0.0, began + under_way_s - time.monotonic()))
    died = time.monotonic()
    before[VICTIM].kill()
    before[0].wait(lambda report: report.phase is Phase.BROKEN)
    plan, members = (cluster.rerouted if case.is_rerouted else cluster.fastest)(whole, VICTIM)
    cluster.form(plan, members, abandoned=whole.generation)
    formed = cluster.wait_formed(members, plan.generation)[0]
    assert (formed.step, formed.rung) == (step, "peers"), formed
    (rest_began, rest_s), (_, again_s) = _steps(cluster, members[: plan.num_workers], plan.generation)
    cluster.replace([VICTIM])
    kept = 0 if formed.in_flight is None else formed.in_flight.kept
    simulated_kept, simulated_s = _simulated(cluster, whole, before, plan, members, under_way_s)
    simulated_again_s = StepProgress(plan, cluster.calibration).time_s
    every = NUM_MICRO_BATCHES * plan.num_sections
    return f"{whole.shape} to {plan.shape}", {
        "kept %": 100 * kept / every,
        "simulated kept %": 100 * simulated_kept / every,
        "morph s": rest_began - died,
        "rest s": rest_s,
        "simulated rest s": simulated_s,
        "rest / simulated": rest_s / simulated_s,
        "begun again s": again_s,
        "simulated again s": simulated_again_s,
        "begun again / simulated": again_s / simulated_again_s,
    }


def _steps(cluster: Cluster, workers: Sequence[Trainer], generation: int) -> list[tuple[float, float]]:
    """When each of the generation's first two steps began, and seconds from the first worker's to the last
    one's commit."""
    ended = zip(*(cluster.wait_moments(one, "committed", generation, 2)[:2] for one in workers), strict=True)
    began = zip(*(cluster.moments(one, "began", generation)[:2] for one in workers), strict=True)
    return [(min(first), max(last) - min(first)) for first, last in zip(began, ended, strict=True)]


def _simulated(
    cluster: Cluster,
    whole: Plan,
    before: Sequence[Trainer],
    plan: Plan,
    members: Sequence[Trainer],
    under_way_s: float,
) -> tuple[int, float]:
    """As a replay has it: the contributions that are kept of a step of `whole`, and seconds for its rest."""
    flight = StepsInFlight(cluster.calibration)
    flight.cut_off(whole, [one.worker for one in before], None, under_way_s, step=0, branch=0)
    beginning = Beginning("peers", step=0, branch=0, kept=frozenset())
    found = flight.go_on(plan, [one.worker for one in members], beginning)
    if found is None:
        return 0, StepProgress(plan, cluster.calibration).time_s
    return sum(len(one.pairs) for one in found.step.kept), found.progress.time_s
