"""The naive way: P never changes, and every change restarts all."""

from __future__ import annotations

from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from ..planner import CachedPlanner
from .policy import Policy


def _answer(planner: CachedPlanner, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
    """A grid of the job's P; what was held is not there to reroute with."""
    return planner.answer(state, command.model_copy(update={"lasts_s": None, "reconsider": False}), now)


FIXED = Policy(
    name="fixed",
    about="D as large as fits; every change restarts all from the last checkpoint",
    answer=_answer,
    keeps_state=False,
    fixes_depth=True,
)
