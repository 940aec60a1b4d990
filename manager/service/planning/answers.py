"""Answers `ComputePlan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ....morphing import Infeasible, choose
from ....simulator import InvalidCalibration
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from .present_plan import or_present
from .requests import request_of
from .weighing import Offer, passed_over, weighed

Choose: TypeAlias = Callable[[JobState, ComputePlan, Callable[[], float]], PlanComputed]
"""From a job's state, the core's question and a clock to the plan that its workers are to follow."""


def compute_plan(state: JobState, command: ComputePlan, clock: Callable[[], float]) -> PlanComputed:
    """The best plan for the command's workers, or why there is none. Blocks; pure but for `clock`.

    A plan that keeps what is there is taken where it is worth as much: the one that runs, or ran, rerouted,
    or one around the pipelines that are whole.
    """
    try:
        return or_present(state, command, best_plan(state, command, clock))
    except InvalidCalibration as error:
        return _none(command, clock, f"the calibration cannot be used: {error}")


def best_plan(state: JobState, command: ComputePlan, clock: Callable[[], float]) -> PlanComputed:
    """The best new plan for the command's workers, whatever ran before. Raises `InvalidCalibration`."""
    request = request_of(state, command.workers, command.generation, command.risk)
    answer = choose(request)
    if isinstance(answer, Infeasible):
        return _none(command, clock, answer.reason)
    best = Offer("best", request, answer.plan, answer.workers, answer.predicted_s)
    return PlanComputed(
        now=clock(),
        generation=command.generation,
        asked=command.asked,
        plan=answer.plan.to_json(),
        workers=answer.workers,
        predicted_s=answer.predicted_s,
        alternatives=(weighed([best], command.ends_s)[0][1], *passed_over(answer)),
    )


def _none(command: ComputePlan, clock: Callable[[], float], reason: str) -> PlanComputed:
    return PlanComputed(
        now=clock(), generation=command.generation, asked=command.asked, plan=None, reason=reason
    )
