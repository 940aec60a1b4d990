"""What the trainers of a replay hold of a step that was cut off, over deaths and changes of shape."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import pytest
from calibrations import uniform
from makara.manager.replay import step_in_flight
from makara.manager.replay.step_in_flight import Continued, StepsInFlight
from makara.manager.world import Beginning
from makara.pipeline import Plan, Range, grid
from makara.pipeline.contributions import Pairs, micro_batches_of
from makara.simulator import StepProgress

NUM_SECTIONS, NUM_MICRO_BATCHES = 6, 12


def beginning(rung: str = "peers", step: int = 7, branch: int = 3) -> Beginning:
    return Beginning(rung, step, branch, frozenset())  # type: ignore[arg-type]


def shape(depth: int, replicas: int) -> Plan:
    size = NUM_SECTIONS // depth
    return grid([Range(i * size, (i + 1) * size) for i in range(depth)], replicas, NUM_MICRO_BATCHES)


def held_sets(steps: StepsInFlight, workers: list[str]) -> list[int]:
    return [
        reduce(or_, (steps.held[worker].contributions.get(section, 0) for worker in workers), 0)
        for section in range(NUM_SECTIONS)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_what_the_living_hold_counts_once_over_any_deaths(seed: int) -> None:
    chance = random.Random(seed)
    calibration = uniform(NUM_SECTIONS)
    steps = StepsInFlight(calibration)
    plan, workers = shape(3, 3), [f"vm{n}.0" for n in range(9)]
    continued: Continued | None = None
    for _ in range(4):
        whole = StepProgress(plan if continued is None else continued.rest, calibration)
        steps.cut_off(plan, workers, continued, chance.random() * whole.time_s, step=7, branch=3)
        living = [worker for worker in workers if chance.random() < 0.8] or workers[:1]
        wanted = held_sets(steps, living)
        chance.shuffle(living)
        depth, replicas = chance.choice(
            [(d, r) for d in (1, 2, 3) for r in (1, 2, 3) if d * r <= len(living)]
        )
        plan = shape(depth, replicas)
        continued = steps.go_on(plan, living, beginning())
        if continued is None:
            assert not any(wanted)
            return
        every = (1 << NUM_MICRO_BATCHES) - 1
        assert continued.step.missing == {
            (section,): Pairs((section,), (every & ~bits,)) for section, bits in enumerate(wanted)
        }
        workers = living[: plan.num_workers]
        steps.begin(workers, beginning(), continued)
        assert held_sets(steps, workers) == wanted
        for worker, span in zip(workers, plan.ranges, strict=True):
            assert all(section in span for section in steps.held[worker].contributions)
        losses = [set(micro_batches_of(steps.held[worker].losses)) for worker in workers]
        assert sum(map(len, losses)) == len(set().union(*losses))


@pytest.mark.parametrize("other", [{"rung": "store"}, {"step": 8}, {"branch": 4}])
def test_of_another_state_nothing_counts(other: dict[str, object]) -> None:
    steps, plan, workers = StepsInFlight(uniform(NUM_SECTIONS)), shape(3, 1), ["a.0", "b.0", "c.0"]
    steps.cut_off(plan, workers, None, 20.0, step=7, branch=3)
    assert steps.go_on(plan, workers, beginning()) is not None
    assert steps.go_on(plan, workers, beginning(**other)) is None  # type: ignore[arg-type]
    steps.committed()
    assert steps.go_on(plan, workers, beginning()) is None


def test_the_form_of_a_plan_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Plan] = []

    class Counted(StepProgress):
        def __init__(self, plan: Plan, *arguments: Any, **named: Any) -> None:
            simulated.append(plan)
            super().__init__(plan, *arguments, **named)

    monkeypatch.setattr(step_in_flight, "StepProgress", Counted)
    steps, plan = StepsInFlight(uniform(NUM_SECTIONS)), shape(3, 1)
    for number, workers in enumerate((["a.0", "b.0", "c.0"], ["d.0", "e.0", "f.0"])):
        steps.cut_off(replace(plan, generation=number), workers, None, 1.0, step=7, branch=3)
    assert len(simulated) == 1
    steps.cut_off(plan, ["a.0", "a.1", "c.0"], None, 1.0, step=7, branch=3)  # two on one VM
    assert len(simulated) == 2
