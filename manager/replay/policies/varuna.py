"""Varuna (§4): at every change the grid that does most samples/s, whatever may come next.

Varuna itself goes back to its last checkpoint at every change. Here survivors keep their state, and the step
in flight, as under every other policy, so that only the choice of plans differs.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from ..planner import CachedPlanner
from .policy import Policy


def fastest_grid(planner: CachedPlanner, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
    """The planner's answer if it knows of no deaths, and may neither reroute nor have unequal pipelines."""
    assert state.spec is not None, "only a submitted job is planned"
    parallelism = state.spec.parallelism.model_copy(update={"unequal_pipelines": "off"})
    of_grids = replace(state, spec=state.spec.model_copy(update={"parallelism": parallelism}))
    blind = {"risk": None, "lasts_s": None, "reconsider": False}
    return planner.answer(of_grids, command.model_copy(update=blind), now)


VARUNA = Policy(name="varuna", about="the fastest grid at every change", answer=fastest_grid)
