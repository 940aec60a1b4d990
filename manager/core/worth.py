"""When a change of plan pays: what it saves of each step, for as long as it lasts, against what it costs.

It must pay for itself twice over, for the gain is only predicted. What it costs is the time in which nothing
steps: what the last generation took to form, once all its members were there. Until then the old plan goes
on, however long VMs take to boot.
"""

from __future__ import annotations

import math
import statistics

from ...protocol.messages import Formed
from .commands import DeathRisk
from .context import Context
from .state import Generation, JobState
from .timing import Timing

_TIMES = 2.0
_PRIOR_LOSSES, _PRIOR_SIZE = 2, 2.0  # so many losses of so many VMs are taken for granted
_WAITING = "rendezvous"  # newcomers are there while the others still step


def least_gain(context: Context, at_least: float, lasts_s: float) -> float:
    """The part of a step that a change must save which lasts for so long; `at_least` this, and at most 1."""
    if lasts_s <= 0:
        return 1.0
    return min(1.0, max(at_least, _TIMES * change_s(context.state, context.timing) / lasts_s))


def steps_left(context: Context) -> int:
    return context.spec.training.steps - max(context.state.progress_step, context.observations.newest_step)


def lasts_s(context: Context) -> float:
    """For how long a change that begins now would be of use: until VMs are lost again, or the job ends.

    Losses come as often as they did while the job ran. Of the job's rest, what VMs take to join is lost.
    """
    state = context.state
    lasts_s = _between_losses_s(state, context.now, context.timing)
    predicted_s = state.current.predicted_s if state.current is not None else None
    if predicted_s is not None:
        lasts_s = min(lasts_s, steps_left(context) * predicted_s - join_s(state))
    return lasts_s


def _between_losses_s(state: JobState, now: float, timing: Timing) -> float:
    """From one loss of VMs to the next, in the time in which the job ran; one is taken for granted."""
    ran = [(g.formed_at, g.ended_at) for g in (*state.history, state.current) if g is not None]
    ran_s = sum(max(0.0, (end or now) - begin) for begin, end in ran if begin is not None)
    return (ran_s + timing.between_losses_s) / (state.losses.count + 1)


def risk(state: JobState, now: float, timing: Timing) -> DeathRisk:
    """What plans are weighed with, in coarse steps, so that the answers to two questions can be the same.

    Of a checkpoint's interval half is lost on average when there is no other way than back to it, and half a
    step.
    """
    assert state.spec is not None, "only a submitted job is planned"
    losses, checkpoint = state.losses, state.spec.checkpoint
    mean_size = (losses.num_vms + _PRIOR_LOSSES * _PRIOR_SIZE) / (losses.count + _PRIOR_LOSSES)
    return DeathRisk(
        losses_per_s=_coarse(1.0 / _between_losses_s(state, now, timing)),
        mean_size=max(1.0, _coarse(mean_size)),
        redo_s=_coarse((checkpoint.interval_s or 0.0) / 2 + change_s(state, timing)),
        redo_steps=((checkpoint.interval_steps or 0) + 1) / 2,
        form_s=_coarse(change_s(state, timing)),
    )


def _coarse(value: float) -> float:
    """The nearest of the powers of the root of 2."""
    return 2.0 ** (round(2 * math.log2(value)) / 2)


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


def change_s(state: JobState, timing: Timing) -> float:
    """For how long nothing steps while a plan changes."""
    last = last_formed(state)
    formed = last.formed if last is not None else None
    return max(0.0 if formed is None else forming_s(formed), timing.least_morph_s)


def forming_s(formed: Formed) -> float:
    """What forming took once all had come."""
    return sum(phase_s for name, phase_s in formed.phases_s.items() if name != _WAITING)
