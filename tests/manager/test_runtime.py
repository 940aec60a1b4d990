"""What a manager remembers of a job beside its facts."""

from __future__ import annotations

from makara.manager.service.runtime import FirstStep, Job
from makara.manager.service.views.steps import measured_s
from makara.protocol.messages import StepMetrics


def step(number: int, generation: int) -> StepMetrics:
    return StepMetrics(step=number, generation=generation, loss=1.0, grad_norm=1.0, seconds=0.1, samples=8)


def test_a_step_that_two_agents_tell_of_is_new_once() -> None:
    job = Job("gpt", [], [])
    assert job.add_steps([step(1, 1), step(2, 1)], now=10.0) == [step(1, 1), step(2, 1)]
    assert job.add_steps([step(2, 1), step(3, 1)], now=11.0) == [step(3, 1)]


def test_the_first_step_of_a_generation_is_timed() -> None:
    job = Job("gpt", [], [])
    job.add_steps([step(1, 1), step(2, 1)], now=10.0)
    job.add_steps([step(2, 2), step(3, 2)], now=20.0)
    job.add_steps([step(4, 2)], now=30.0)
    assert {number: first.at for number, first in job.first_steps.items()} == {1: 10.0, 2: 20.0}


def test_a_step_between_generations_is_timed_from_the_step_before() -> None:
    """But not if steps were lost in between, which are done again."""
    job = Job("gpt", [], [])
    job.add_steps([step(1, 1), step(2, 1)], now=10.0)
    job.add_steps([step(3, 2)], now=12.5)
    job.add_steps([step(4, 2)], now=13.0)
    job.add_steps([step(3, 3)], now=20.0)
    assert job.first_steps == {1: FirstStep(10.0), 2: FirstStep(12.5, 2.5, 0.1), 3: FirstStep(20.0)}


def test_what_a_step_takes_undisturbed_is_told_without_a_generations_first_step() -> None:
    """Found: a first step with `exact` runs twice, so one that a death cut off seemed shorter."""
    job = Job("gpt", [], [])
    slow = step(1, 1).model_copy(update={"seconds": 40.0})
    job.add_steps([slow], now=40.0)
    job.add_steps([step(2, 2)], now=42.5)
    job.add_steps([slow.model_copy(update={"step": 3, "generation": 3}), step(4, 3)], now=80.0)
    job.add_steps([step(5, 4)], now=81.0)
    assert job.first_steps[2] == FirstStep(42.5, 2.5, None)
    assert job.first_steps[4] == FirstStep(81.0, 1.0, 0.1)
    assert measured_s(job) == 0.1


def test_a_restarted_manager_takes_no_later_step_for_the_first() -> None:
    job = Job("gpt", [], [step(1, 1), step(2, 1)])
    job.add_steps([step(3, 1)], now=99.0)
    assert job.first_steps == {}
