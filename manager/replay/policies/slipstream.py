"""SlipStream (§3.1): peers take the work of the dead until a section has no host; then the fastest grid.

Workers beside the plan, spares or newcomers, take the places of the dead: then all form the fastest grid.
"""

from __future__ import annotations

from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from ..planner import CachedPlanner
from .policy import Answer, Policy
from .varuna import fastest_grid


def rerouting_until(otherwise: Answer) -> Answer:
    """An answer that reroutes while that is possible, and none of the workers would be left idle."""

    def answer(planner: CachedPlanner, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
        hosting = {incarnation.worker for incarnation in state.hosts}
        if command.asked <= hosting:
            found = planner.rerouted(state, command, now)
            if found is not None:
                return found
        return otherwise(planner, state, command, now)

    return answer


SLIPSTREAM = Policy(
    name="slipstream",
    about="rerouted while each section has a host, else the fastest grid",
    answer=rerouting_until(fastest_grid),
)
