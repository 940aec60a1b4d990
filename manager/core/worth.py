"""What the core knows of what a change of plan costs and is good for: see docs/choice.md.

A change costs the time in which nothing steps: what the last generation took to form, once all its members
were there. Until then the old plan goes on, however long VMs take to boot. It is good until VMs are lost
again, others join, or the job ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Set

from ...protocol.messages import Formed
from ..spec.job_spec import JobSpec
from .commands import DeathRisk
from .context import Context
from .state import Generation, JobState, staying_vms
from .timing import Timing

_PRIOR_LOSSES, _PRIOR_SIZE = 2, 2.0  # so many losses of so many VMs are taken for granted
_WAITING = "rendezvous"  # newcomers are there while the others still step


def rest_s(context: Context) -> float:
    """What the job's steps left take under the plan that runs, or ran last; infinite if that is not known."""
    last = last_formed(context.state)
    if last is None:
        return math.inf
    step_s = max(last.predicted_s or 0.0, context.observations.measured_s(last.number))
    return (context.spec.training.steps - _step(context)) * step_s if step_s else math.inf


def _step(context: Context) -> int:
    """The step that the job is at; those that were lost, or that a person did without, are still to come."""
    state, current = context.state, context.state.current
    if current is None or current.formed is None or current.number <= state.discarded:
        return max(context.held_step(), state.saved_step)
    return max(context.observations.newest_step, current.formed.step)


def lasts_s(context: Context, ends_s: float) -> float:
    """For how long a plan that begins now is expected to run: until VMs are lost again, as often as they were
    while the job ran, or it ends anyway."""
    return max(0.0, min(_between_losses_s(context.state, context.now, context.timing), ends_s))


def ends_s(context: Context, ready: Set[str]) -> float:
    """When a plan that begins now ends though no VM is lost: others join, or the job ends. `ready`: the VMs
    that it may use."""
    return max(0.0, min(rest_s(context), _others_join_s(context, ready)))


def _others_join_s(context: Context, ready: Set[str]) -> float:
    """Until VMs join beside those that are ready; infinite if none are to.

    One that its cloud has made is there when others were after as long; one that is late, as much later
    again. Where none is on its way, others come after as long as VMs take to join, or as long as none came.
    """
    state, now = context.state, context.now
    usual_s = join_s(state)
    if not usual_s:
        return math.inf
    coming = [vm for vm in staying_vms(state) if vm.vm not in ready | context.observations.unheard]
    due = [
        now - vm.joined_at
        if vm.joined_at is not None
        else abs((vm.attempted_at or vm.requested_at) + usual_s - now)
        for vm in coming
        if vm.joined_at is not None or vm.created_at is not None
    ]
    if due:
        return max(context.timing.settle_s, min(due))
    if len(ready) >= context.spec.resources.max_nodes:
        return math.inf
    current = state.current
    formed_at = current.formed_at if current is not None else None
    return max(usual_s, 0.0 if formed_at is None else now - formed_at)


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
        losses_per_s=coarse(1.0 / _between_losses_s(state, now, timing)),
        mean_size=max(1.0, coarse(mean_size)),
        redo_s=coarse((checkpoint.interval_s or 0.0) / 2 + change_s(state, timing)),
        redo_steps=((checkpoint.interval_steps or 0) + 1) / 2,
        form_s=coarse(change_s(state, timing)),
    )


def first_risk(spec: JobSpec, timing: Timing) -> DeathRisk:
    """What the first plan of a job is weighed with, before anything is known of its VMs."""
    return risk(JobState(spec=spec), 0.0, timing)


def coarse(value: float) -> float:
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
    """For how long nothing steps while a plan changes that was not foreseen, at least `least_morph_s`."""
    return max(formed_s(state), timing.least_morph_s)


def formed_s(state: JobState) -> float:
    """For how long nothing stepped while the last generation formed, once its members were there."""
    last = last_formed(state)
    formed = last.formed if last is not None else None
    return 0.0 if formed is None else forming_s(formed)


def forming_s(formed: Formed) -> float:
    """What forming took once all had come."""
    return sum(phase_s for name, phase_s in formed.phases_s.items() if name != _WAITING)
