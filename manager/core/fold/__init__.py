"""How each fact changes the state of a job. A fact about something unknown is counted, no more.

In: a state and a fact; out: the next state. Each module has the rules of one kind of facts, as `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..facts import Fact
from ..state import JobState
from . import generations, job, renting, vms, workers

__all__ = ["apply", "fold"]


def apply(state: JobState, fact: Fact) -> JobState:
    """The state after `fact`. Pure; the fold of a job's facts from `JobState()` is the job."""
    after = _RULES[type(fact)](state, fact)
    return after.changed(num_facts=state.num_facts + 1, told_at=fact.at)


def fold(facts: Iterable[Fact]) -> JobState:
    """The state that a journal tells."""
    state = JobState()
    for fact in facts:
        state = apply(state, fact)
    return state


_RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    **job.RULES,
    **vms.RULES,
    **renting.RULES,
    **workers.RULES,
    **generations.RULES,
}
