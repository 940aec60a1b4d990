"""When a change of plan pays: what it saves of each step, for as long as it lasts, against what it costs.

It must pay for itself twice over, for the gain is only predicted. What it costs is the time in which nothing
steps: what the last generation took to form, once all its members were there. Until then the old plan goes
on, however long VMs take to boot.
"""

from __future__ import annotations

import statistics

from .context import Context
from .state import Generation, JobState

_TIMES = 2.0
_WAITING = "rendezvous"  # newcomers are there while the others still step


def least_gain(context: Context, at_least: float, lasts_s: float) -> float:
    """The part of a step that a change must save which lasts for so long; `at_least` this, and at most 1."""
    if lasts_s <= 0:
        return 1.0
    return min(1.0, max(at_least, _TIMES * change_s(context) / lasts_s))


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


def change_s(context: Context) -> float:
    """For how long nothing steps while a plan changes."""
    last = last_formed(context.state)
    phases_s = last.formed.phases_s if last is not None and last.formed is not None else {}
    formed_s = sum(phase_s for name, phase_s in phases_s.items() if name != _WAITING)
    return max(formed_s, context.timing.least_morph_s)
