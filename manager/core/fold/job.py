"""How a job begins, stops, waits, ends and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...spec.job_spec import JobSpec
from ..facts import (
    GrowthWeighed,
    HoldChanged,
    IsolationChanged,
    JobContinued,
    JobEnded,
    JobResumed,
    Obsolete,
    PersonNeeded,
    PlanKept,
    Resumption,
    StartCopied,
    StopOrdered,
    Submitted,
    TrainingFinished,
)
from ..state import JobState, Waiting, order_of
from ..strikes.ledger import Ledger, forgive_on_progress
from ..strikes.table import Progress
from . import renting


def _submitted(state: JobState, fact: Submitted) -> JobState:
    spec = JobSpec.model_validate(fact.spec)
    return state.changed(
        job=fact.job,
        spec=spec,
        bundle_sha256=fact.bundle_sha256,
        submitted_at=fact.at,
        start=fact.start,
        owner=fact.owner,
    )


def _start_copied(state: JobState, fact: StartCopied) -> JobState:
    if not state.copying:
        return state
    published = (*state.published, fact.checkpoint)
    return state.changed(copied=fact, published=published, progress_step=fact.checkpoint.step)


def _unchanged(state: JobState, fact: Obsolete | PlanKept | GrowthWeighed) -> JobState:
    return state


def _hold_changed(state: JobState, fact: HoldChanged) -> JobState:
    return state.changed(hold=fact.hold)


def _isolation_changed(state: JobState, fact: IsolationChanged) -> JobState:
    return state.changed(isolated=fact.isolated)


def _stop_ordered(state: JobState, fact: StopOrdered) -> JobState:
    """What was impossible was so for training; to save what is held, any number of workers will do."""
    return state.changed(stop_ordered_at=fact.at, failure=fact.failure, waiting=None, impossible=None)


def _training_finished(state: JobState, fact: TrainingFinished) -> JobState:
    return state.changed(finished=fact.checkpoint)


def _person_needed(state: JobState, fact: PersonNeeded) -> JobState:
    found = fact.head_generation, fact.checkpoints, fact.console
    return state.changed(waiting=Waiting(fact.at, fact.reason, fact.offers, fact.vms_until, *found))


def _job_resumed(state: JobState, fact: JobResumed) -> JobState:
    """Generations go on above the head's, whoever opened that. To try again accepts nothing: a head that is
    still another's is found to be so again."""
    state = renting.with_first_tried_alone(state).changed(
        waiting=None,
        answered=fact.how,
        hold=False,
        impossible=None,
        enough=None,
        strikes=forgive_on_progress(state.strikes, Progress.PERSON),
        last_generation=max(state.last_generation, fact.head_generation),
    )
    if state.recipe is not None and (fact.how is Resumption.RESTART or state.progress_step == 0):
        # No step was made with the old bits that those to come would have to match.
        state = state.changed(recipe=state.recipe.without_bits())
    if fact.how is Resumption.AGAIN:
        return state
    restarts = fact.how is Resumption.RESTART
    published = tuple(sorted(fact.checkpoints, key=order_of)) if fact.how is Resumption.FROM_HEAD else ()
    return state.changed(
        published=published,
        damaged=(),
        # What the head lacks is no more believed when a worker reports it.
        retired=max([state.retired, *map(order_of, state.published)]),
        base=None,
        head_generation=max(state.head_generation, fact.head_generation),
        opened_generation=fact.head_generation,
        # A generation whose head it is goes on from what its workers hold, whatever the head lists.
        discarded=max(state.discarded, state.last_generation if restarts else fact.head_generation - 1),
        restarting=restarts,
        progress_step=max((c.step for c in published), default=0),
    )


def _job_ended(state: JobState, fact: JobEnded) -> JobState:
    return state.changed(ended=fact, ended_at=fact.at)


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
    return renting.with_first_tried_alone(state).changed(
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
    "strikes": Ledger(),
    "newest_unfit": "",
    "spot_absent_since": None,
    "enough": None,
}


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    Submitted: _submitted,
    StartCopied: _start_copied,
    Obsolete: _unchanged,
    PlanKept: _unchanged,
    GrowthWeighed: _unchanged,
    HoldChanged: _hold_changed,
    IsolationChanged: _isolation_changed,
    StopOrdered: _stop_ordered,
    TrainingFinished: _training_finished,
    PersonNeeded: _person_needed,
    JobResumed: _job_resumed,
    JobEnded: _job_ended,
    JobContinued: _continued,
}
