"""What a policy may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ....simulator import Calibration
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from ...spec.job_spec import JobSpec
from ..planner import CachedPlanner

Answer: TypeAlias = Callable[[CachedPlanner, JobState, ComputePlan, float], PlanComputed]
"""From the planner, the job's state, the core's question and the time now to the answer."""


def _as_it_is(calibration: Calibration) -> Calibration:
    return calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a job answers the core's questions for a plan, and what it keeps of what was done."""

    name: str
    about: str
    answer: Answer = CachedPlanner.answer
    model: Callable[[Calibration], Calibration] = _as_it_is
    """The calibration of a job that trains under this policy, where the policy has workers do more."""
    keeps_state: bool = True
    """Whether survivors go on with what they hold, the step in flight included; else all start again from the
    last checkpoint."""
    fixes_depth: bool = False
    """Whether P stays what it was at first; D is then what fits."""

    def choose_plan(self, state: JobState, command: ComputePlan, clock: Callable[[], float]) -> PlanComputed:
        """As a real manager asks its planner: of earlier answers nothing is remembered."""
        return self.answer(CachedPlanner(), state, command, clock())


def with_depth(spec: JobSpec, depth: int) -> JobSpec:
    """The job with P fixed to `depth`."""
    parallelism = spec.parallelism.model_copy(
        update={"pipeline_parallel_degree": depth, "data_parallel_degree": None}
    )
    return spec.model_copy(update={"parallelism": parallelism})
