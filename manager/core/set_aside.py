"""A job about which the rules cannot decide can still be stopped: its workers save, its VMs are released."""

from __future__ import annotations

from ...protocol.messages import Phase
from .context import Context, Decision
from .events import Event, StopRequested
from .facts import JobEnded, StopOrdered
from .observations import Observations
from .rules import ending
from .state import JobState
from .timing import Timing

_SAVES = (Phase.FORMING, Phase.RUNNING, Phase.OTHER)


def stop_set_aside(
    state: JobState, observations: Observations, event: Event, timing: Timing, *, readable: bool, why: str
) -> Decision:
    """What `event` brings about for a job that is set aside, by no rule but this one.

    The first request to stop orders the workers to hold after a checkpoint. The job ends when none steps any
    more, `stop_timeout_s` later, or at the next request; at once if its facts are not all `readable`, since
    nobody knows then what its workers were told. Other events bring about nothing.
    """
    context = Context(state, observations, event, timing)
    asked = isinstance(event, StopRequested)
    if state.ended is not None or not (asked or state.stop_ordered_at is not None):
        return context.decision()
    again = state.stop_ordered_at is not None
    if asked and not again:
        context.fact(StopOrdered(at=context.now))
    saving = any(worker.phase in _SAVES for _, worker in context.reports())
    if not readable or not saving or context.stop_is_late() or (asked and again):
        ended = JobEnded(
            at=context.now, status="stopped", reason=f"as requested, while it was set aside: {why}"
        )
        ending.end(context, ended)
    return context.decision()
