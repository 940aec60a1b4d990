"""VMs of a cloud that the plan that runs has no use for: a reserve for a while, then released.

Then no more are asked for than the plan uses, for a while or until another one runs: what the planner had
expected of them (`growth`) did not come true.
"""

from __future__ import annotations

from ...spec.resources import CLOUDS
from ..events import Tick
from ..facts import EndReason
from ..state import Generation, JobState, staying_vms, vm_of, vms_of, wanted_vms
from ..turn import Turn, seat_of
from ..vms import Vm, VmStatus

LOWERED = "the plan that runs has no use for more"


def release(turn: Turn) -> None:
    """Release those that were without work for long, the newest first."""
    state = turn.state
    current = _settled(turn)
    if current is None or not isinstance(turn.event, Tick):
        return
    num_ready = sum(_is_known(turn, vm) for vm in staying_vms(state))
    num_spare = num_ready - _used(state, len(vms_of(current)))
    for vm in reversed(state.live_vms):
        if num_spare > 0 and _is_unused(turn, vm, current):
            detail = f"without work in the plan {current.shape} for {turn.timing.unused_s:g} s"
            turn.end_vm(vm.vm, EndReason.UNUSED, detail)
            num_spare -= 1


def wanted(turn: Turn) -> int:
    """How many VMs are asked for now."""
    state = turn.state
    most, enough = wanted_vms(state), state.enough
    if enough is None or turn.elapsed_s(enough.since) > turn.timing.grow_again_s:
        return most
    return min(most, _used(state, enough.num_vms))


def _settled(turn: Turn) -> Generation | None:
    """The generation that runs, if no other is on its way, nor a VM with which another plan may be found."""
    state, current = turn.state, turn.state.current
    if not state.active or state.hold or state.planned is not None or turn.isolated:
        return None
    if turn.vitals.planning is not None or current is None or current.formed is None:
        return None
    coming = any(vm.status is VmStatus.REQUESTED and vm.id for vm in state.live_vms)
    return None if coming else current


def _is_unused(turn: Turn, vm: Vm, current: Generation) -> bool:
    """Whether the planner has known its workers for long, and the plan has none of them.

    A slow worker is tried again, by a rule of its own (`drift`).
    """
    state, vitals = turn.state, turn.vitals
    if vm.attempt is None or vm.attempt.placement.provider not in CLOUDS or vm.status is not VmStatus.JOINED:
        return False
    if vm.at_risk or vm.vm in vms_of(current) or not _is_known(turn, vm):
        return False
    if any(vm_of(worker) == vm.vm for worker in state.slow):
        return False
    since = max(current.formed_at or 0.0, vm.joined_at or 0.0, vitals.answered_at)
    return turn.elapsed_s(since) > turn.timing.unused_s


def _is_known(turn: Turn, vm: Vm) -> bool:
    """Whether all of its workers are among those about which the planner has given its answer."""
    vitals, pulse = turn.vitals, turn.vitals.pulses.get(vm.vm)
    if pulse is None or vm.vm in vitals.unheard or not pulse.report.workers:
        return False
    return all(seat_of(worker) in vitals.planned_for for worker in pulse.report.workers)


def _used(state: JobState, num_vms: int) -> int:
    assert state.spec is not None, "VMs are for submitted jobs"
    return max(state.spec.resources.min_nodes, num_vms)
