"""A job that had ended goes on: one that was stopped, or that failed, from its newest checkpoint.

Nothing of its VMs is left, and nothing that they said counts. The generation that opens next fences off
whatever of them still lives: until then it may publish, and what it publishes is gone on from.
"""

from __future__ import annotations

from ..events import ContinueRequested
from ..facts import JobContinued
from ..state import JobState
from ..turn import Turn
from . import ending, starting

_KEPT = {"min_nodes", "max_nodes", "max_hourly_cost", "budget"}


def take(turn: Turn) -> None:
    """A person has it go on."""
    event = turn.event
    if not isinstance(event, ContinueRequested) or not can_go_on(turn.state):
        return
    turn.fact(JobContinued(at=turn.now, **event.model_dump(include=_KEPT)))
    if turn.state.finished is not None:
        turn.command(ending.export_of(turn))
    starting.order_copy(turn)


def can_go_on(state: JobState) -> bool:
    """Whether the job has ended with something left to do."""
    return state.ended is not None and state.ended.status != "finished"
