"""When a change of plan pays: what it saves of each step, for as long as it lasts, against what it costs.

It must pay for itself twice over, for the gain is only predicted. What it costs is the time in which nothing
steps: the last generation's, from its opening until it had formed. Before that the old plan goes on, however
long VMs take to boot.
"""

from __future__ import annotations

import statistics

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


def lasts_s(context: Context) -> float:
    """For how long a change that begins now would be of use: until VMs are lost again, or the job ends.

    Losses come as often as they did while the job ran. Of the job's rest, what VMs take to join is lost.
    """
    state, timing = context.state, context.timing
    ran = [(g.formed_at, g.ended_at) for g in (*state.history, state.current) if g is not None]
    ran_s = sum(max(0.0, (end or context.now) - begin) for begin, end in ran if begin is not None)
    lasts_s = (ran_s + timing.between_losses_s) / (state.losses.count + 1)
    predicted_s = state.current.predicted_s if state.current is not None else None
    if predicted_s is not None:
        lasts_s = min(lasts_s, steps_left(context) * predicted_s - join_s(state))
    return lasts_s


def join_s(state: JobState) -> float:
    """What VMs that live took to join, from when they were asked for."""
    took = [
        vm.joined_at - vm.attempted_at
        for vm in state.live_vms
        if vm.joined_at is not None and vm.attempted_at is not None
    ]
    return max(0.0, statistics.median(took)) if took else 0.0


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
