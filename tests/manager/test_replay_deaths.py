"""More deaths in a replay never make a job faster: no step is won by being cut off."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import replace

import pytest
from calibrations import uniform
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import PlanComputed
from makara.manager.core.state import JobState
from makara.manager.replay import POLICIES, Scenario, replay
from makara.manager.replay.planner import CachedPlanner
from makara.simulator import Link, NodeChange, TraceEvent
from replays import scenario

HOURS = 2
_NO_BETTER = 1.002  # a death may come a moment before the same change of plan would pay without it


class Table(CachedPlanner):
    """A planner that knows from a table what its plans do, as a user's measurements have it."""

    def __init__(self, batch: int, samples_per_s: float) -> None:
        super().__init__()
        self._batch, self._samples_per_s = batch, samples_per_s

    def recalled(
        self,
        key: Hashable,
        state: JobState,
        command: ComputePlan,
        now: float,
        compute: Callable[[], PlanComputed],
    ) -> PlanComputed:
        return self._looked_up(super().recalled(key, state, command, now, compute))

    def _looked_up(self, answer: PlanComputed) -> PlanComputed:
        if answer.plan is None:
            return answer
        step_s = self._batch / (self._samples_per_s * len(answer.workers) ** 0.9)
        return answer.model_copy(update={"predicted_s": step_s})


def market(seed: int, num_nodes: int, every_s: float, one_in: int = 1) -> list[TraceEvent]:
    """A node dies about every `every_s` seconds, and another comes a minute later.

    With `one_in`, only one in so many of these deaths comes, at the same time and in the same place: which
    step a death hits would decide more than how many come.
    """
    draw = random.Random(seed)
    live = [f"n{number}" for number in range(num_nodes)]
    events = [TraceEvent(0, NodeChange.ADD, node) for node in live]
    num_deaths, at_ms = 0, 0
    while (at_ms := at_ms + int(1000 * every_s * draw.uniform(0.5, 1.5))) < HOURS * 3_600_000:
        place, num_deaths = draw.randrange(len(live)), num_deaths + 1
        if num_deaths % one_in:
            continue
        events.append(TraceEvent(at_ms, NodeChange.REMOVE, live[place]))
        live[place] = f"n{num_nodes + num_deaths}"
        events.append(TraceEvent(at_ms + 60_000, NodeChange.ADD, live[place]))
    events.append(TraceEvent(HOURS * 3_600_000 + 60_000, NodeChange.ADD, "last"))  # all last as long
    return sorted(events, key=lambda event: event.time_ms)


def job(num_sections: int, num_nodes: int, forward_s: float, batch: int, trace: list[TraceEvent]) -> Scenario:
    given = scenario(trace, interval="10m", max_nodes=num_nodes)
    calibration = uniform(
        num_sections,
        forward_s=(forward_s,) * num_sections,
        backward_s=(2 * forward_s,) * num_sections,
        input_s=(forward_s,) * num_sections,
        weight_s=(forward_s,) * num_sections,
        gradient_bytes=(1,) * num_sections,
        state_bytes=(51,) * num_sections,
        cut_bytes=(0,) * (num_sections - 1),
        grad_cut_bytes=(0,) * (num_sections - 1),
        inter_vm=Link(latency_s=0.0, bytes_per_s=100.0),
    )
    training = given.spec.training.model_copy(update={"global_batch_size": batch})
    parallelism = given.spec.parallelism.model_copy(update={"unequal_pipelines": "off"})
    spec = given.spec.model_copy(update={"training": training, "parallelism": parallelism})
    return replace(given, spec=spec, calibration=calibration)


@pytest.mark.parametrize("seed", range(3))
def test_more_deaths_never_make_a_job_faster_where_steps_are_known_from_a_table(seed: int) -> None:
    """Found: of steps that a table said to last minutes, and a simulation seconds, each death saved most."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    num_sections, num_nodes = draw.choice((1, 1, 2)), draw.randint(4, 6)
    batch, forward_s = draw.choice((32, 64)), draw.uniform(0.01, 1.0)
    samples_per_s = draw.uniform(0.05, 0.3)
    found = [
        replay(
            job(num_sections, num_nodes, forward_s, batch, market(seed, num_nodes, 600.0, one_in)),
            ("varuna", "oobleck"),
            planner=Table(batch, samples_per_s),
        )
        for one_in in (6, 1)
    ]
    for by_policy in zip(*found, strict=True):
        rates = [outcome.samples_per_s for outcome in by_policy]
        for rarer, oftener in itertools.pairwise(rates):
            assert oftener <= rarer * _NO_BETTER, (by_policy[0].policy, rates)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 60))]
)
def test_more_deaths_never_make_a_job_faster_where_steps_are_simulated(seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    num_sections, num_nodes = draw.choice((1, 2, 4, 12)), draw.randint(3, 8)
    batch, forward_s = draw.choice((16, 32, 64)), 10 ** draw.uniform(-2.0, 0.5)
    found = [
        replay(
            job(num_sections, num_nodes, forward_s, batch, market(seed, num_nodes, 900.0, one_in)),
            [*POLICIES],
        )
        for one_in in (4, 1)
    ]
    for by_policy in zip(*found, strict=True):
        rates = [outcome.samples_per_s for outcome in by_policy]
        assert rates[1] <= rates[0] * _NO_BETTER, (by_policy[0].policy, rates)
