"""When a change of plan pays: what it saves of each step, for as long as it lasts, against what it costs.

It must pay for itself twice over, for the gain is only predicted. What it costs is the time in which nothing
steps: the last generation's, from its opening until it had formed. Before that the old plan goes on, however
long VMs take to boot.
"""

from __future__ import annotations

from .context import Context
from .state import Generation, JobState

_TIMES = 2.0


def least_gain(context: Context, at_least: float, lasts_s: float) -> float:
    """The part of a step that a change must save which lasts for so long; `at_least` this, and at most 1."""
    if lasts_s <= 0:
        return 1.0
    return min(1.0, max(at_least, _TIMES * _cost_s(context) / lasts_s))


def steps_left(context: Context) -> int:
    return context.spec.training.steps - max(context.state.progress_step, context.observations.newest_step)


def last_formed(state: JobState) -> Generation | None:
    """The newest generation that formed since the job began, or went on after its end."""
    for generation in (state.current, *reversed(state.history)):
        if generation is not None and generation.number <= state.started_after:
            return None
        if generation is not None and generation.formed is not None:
            return generation
    return None


def _cost_s(context: Context) -> float:
    last = last_formed(context.state)
    formed_s = (last.formed_at or 0.0) - (last.opened_at or 0.0) if last is not None else 0.0
    return max(formed_s, context.timing.least_morph_s)
