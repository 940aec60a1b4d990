"""A job that had ended goes on: one that was stopped, or that failed, from its newest checkpoint.

Nothing of its VMs is left, and nothing that they said counts. The generation that opens next fences off
whatever of them still lives: until then it may publish, and what it publishes is gone on from.
"""

from __future__ import annotations

from ..context import Context
from ..events import ContinueRequested
from ..facts import JobContinued
from ..state import JobState
from . import ending, starting

_KEPT = {"min_nodes", "max_nodes", "max_hourly_cost", "budget"}


def take(context: Context) -> None:
    """A person has it go on."""
    event = context.event
    if not isinstance(event, ContinueRequested) or not can_go_on(context.state):
        return
    context.fact(JobContinued(at=context.now, **event.model_dump(include=_KEPT)))
    if context.state.finished is not None:
        context.command(ending.export_of(context))
    starting.order_copy(context)


def can_go_on(state: JobState) -> bool:
    """Whether the job has ended with something left to do."""
    return state.ended is not None and state.ended.status != "finished"
