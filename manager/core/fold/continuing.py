"""How facts about going on from a checkpoint change a job's state: one of another job, or its own."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from ..facts import JobContinued, Resumption, StartCopied
from ..failures import Rounds
from ..state import JobState
from .renting import without_not_joined


def _continued(state: JobState, fact: JobContinued) -> JobState:
    """What is known of its model and its checkpoints stays; counts of failures begin anew.

    Its steps begin at the newest checkpoint that is known. A beginning without any that a person had asked
    for (`restarting`) is still to come.
    """
    if state.ended is None or state.spec is None:
        return state
    changes: dict[str, float] = {"min_nodes": fact.min_nodes, "max_nodes": fact.max_nodes}
    caps = {"max_hourly_cost": fact.max_hourly_cost, "budget": fact.budget}
    changes |= {name: amount for name, amount in caps.items() if amount is not None}
    resources = state.spec.resources.model_copy(update=changes)
    progress_step = max((checkpoint.step for checkpoint in state.published), default=0)
    recipe = state.recipe
    if recipe is not None and (state.restarting or (state.head_generation == 0 and state.start is None)):
        recipe = recipe.without_bits()  # no step was made that others have to match
    return without_not_joined(state).changed(
        spec=state.spec.model_copy(update={"resources": resources}),
        recipe=recipe,
        ended=None,
        ended_at=None,
        stop_ordered_at=None,
        failure=None,
        waiting=None,
        answered=Resumption.AGAIN,
        hold=False,
        impossible=None,
        isolated=False,
        profiler=None,
        profile=None,
        broken_profiles=0,
        stall=None,
        started_after=state.last_generation,
        continued_after=state.num_facts + 1,
        progress_step=progress_step,
        unfit=MappingProxyType({}),
        last_error="",
        last_traceback=None,
        **_NO_FAILURES,
    )


_NO_FAILURES: dict[str, Any] = {
    "user_errors": Rounds(),
    "internal_errors": Rounds(),
    "deaths": (),
    "worn_vms": 0,
    "unfit_rounds": Rounds(),
    "newest_unfit": "",
    "replaced_at": 0.0,
    "request_failures": 0,
    "request_failed_at": 0.0,
    "refusals": MappingProxyType({}),
    "spot_absent_since": None,
    "enough": None,
}


def _start_copied(state: JobState, fact: StartCopied) -> JobState:
    if not state.copying:
        return state
    published = (*state.published, fact.checkpoint)
    return state.changed(copying=False, published=published, progress_step=fact.checkpoint.step)


RULES: dict[type[Any], Callable[[JobState, Any], JobState]] = {
    JobContinued: _continued,
    StartCopied: _start_copied,
}
