"""VMs of a cloud that the plan that runs has no use for: a reserve for a while, then released.

Then no more are asked for than the plan uses, for a while or until another one runs: what the planner had
expected of them (`growth`) did not come true.
"""

from __future__ import annotations

from ...spec.resources import CLOUDS
from ..context import Context, incarnation_of
from ..events import Tick
from ..facts import EndReason
from ..state import Generation, staying_vms, vm_of, vms_of, wanted_vms
from ..vms import Vm, VmStatus

LOWERED = "the plan that runs has no use for more"


def release(context: Context) -> None:
    """Release those that were without work for long, the newest first."""
    state = context.state
    current = _settled(context)
    if current is None or not isinstance(context.event, Tick):
        return
    num_ready = sum(_is_known(context, vm) for vm in staying_vms(state))
    num_spare = num_ready - _used(context, len(vms_of(current)))
    for vm in reversed(state.live_vms):
        if num_spare > 0 and _is_unused(context, vm, current):
            detail = f"without work in the plan {current.shape} for {context.timing.unused_s:g} s"
            context.end_vm(vm.vm, EndReason.UNUSED, detail)
            num_spare -= 1


def wanted(context: Context) -> int:
    """How many VMs are asked for now."""
    state = context.state
    most, enough = wanted_vms(state), state.enough
    if enough is None or context.elapsed_s(enough.since) > context.timing.grow_again_s:
        return most
    return min(most, _used(context, enough.num_vms))


def _settled(context: Context) -> Generation | None:
    """The generation that runs, if no other is on its way, nor a VM with which another plan may be found."""
    state, current = context.state, context.state.current
    if not state.active or state.hold or state.planned is not None or context.isolated:
        return None
    if context.observations.planning is not None or current is None or current.formed is None:
        return None
    coming = any(vm.status is VmStatus.REQUESTED and vm.id for vm in state.live_vms)
    return None if coming else current


def _is_unused(context: Context, vm: Vm, current: Generation) -> bool:
    """Whether the planner has known its workers for long, and the plan has none of them.

    A slow worker is tried again, by a rule of its own (`drift`).
    """
    state, observations = context.state, context.observations
    if vm.attempt is None or vm.attempt.placement.provider not in CLOUDS or vm.status is not VmStatus.JOINED:
        return False
    if vm.at_risk or vm.vm in vms_of(current) or not _is_known(context, vm):
        return False
    if any(vm_of(worker) == vm.vm for worker in state.slow):
        return False
    since = max(current.formed_at or 0.0, vm.joined_at or 0.0, observations.answered_at)
    return context.elapsed_s(since) > context.timing.unused_s


def _is_known(context: Context, vm: Vm) -> bool:
    """Whether all of its workers are among those about which the planner has given its answer."""
    observations, workers = context.observations, context.observations.workers_on(vm.vm)
    if not workers or vm.vm in observations.unheard:
        return False
    return all(incarnation_of(worker) in observations.planned_for for worker in workers)


def _used(context: Context, num_vms: int) -> int:
    return max(context.spec.resources.min_nodes, num_vms)
