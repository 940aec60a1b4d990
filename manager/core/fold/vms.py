"""How VMs come and go, and are to hand over before they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..facts import (
    EndReason,
    VmDrained,
    VmEnded,
    VmJoined,
    VmNoticed,
    VmNoticeWithdrawn,
    VmRequested,
    VmRiskChanged,
    VmYielded,
)
from ..state import JobState, vm_of
from ..strikes.ledger import JOB, forgive_on_progress, strike
from ..strikes.table import Kind, Progress
from ..vms import Vm, VmStatus
from . import renting


def _vm_requested(state: JobState, fact: VmRequested) -> JobState:
    if fact.vm in state.vms:
        return state
    return state.with_vm(Vm(fact.vm, requested_at=fact.at, number=len(state.vms)))


def _vm_joined(state: JobState, fact: VmJoined) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None:
        return state
    joined = replace(
        vm,
        status=VmStatus.JOINED,
        joined_at=fact.at,
        joined_step=fact.step,
        address=fact.address,
        devices=fact.devices,
        existed=True,
    )
    return renting.with_joined(state.with_vm(joined), joined)


def _noticed(state: JobState, fact: VmNoticed) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None:
        return state
    state = _forgiven(state, fact.vm, Progress.VM_LOST)  # word of its end may come with the first signs of it
    noticed = replace(vm, status=VmStatus.NOTICED, deadline=fact.deadline, action=fact.action)
    return state.with_vm(noticed)


def _withdrawn(state: JobState, fact: VmNoticeWithdrawn) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or vm.status is not VmStatus.NOTICED:
        return state
    status = VmStatus.JOINED if vm.drained_at is None else VmStatus.NOTICED
    # No plan did without the VM; that it stays may be all that the plan that runs needs.
    impossible = None if state.running else state.impossible
    withdrawn = replace(vm, status=status, deadline=None, action="")
    return state.changed(impossible=impossible).with_vm(withdrawn)


def _drained(state: JobState, fact: VmDrained) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.joined:
        return state
    return state.with_vm(replace(vm, status=VmStatus.NOTICED, drained_at=fact.at))


def _yielded(state: JobState, fact: VmYielded) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None or not vm.joined:
        return state
    if not fact.stays:
        return state.with_vm(replace(vm, status=VmStatus.NOTICED, drained_at=fact.at, yielded=fact.why))
    status = VmStatus.JOINED if vm.deadline is None else VmStatus.NOTICED
    impossible = None if state.running else state.impossible
    kept = replace(vm, status=status, drained_at=None, yielded="")
    return state.changed(impossible=impossible).with_vm(kept)


def _risk_changed(state: JobState, fact: VmRiskChanged) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None:
        return state
    return state.with_vm(replace(vm, at_risk=fact.at_risk))


def _vm_ended(state: JobState, fact: VmEnded) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None:
        return state
    # A place that refused, or never answered, is left alone; the others are not.
    refused = vm.attempt is not None and (vm.attempted_at is None or renting.is_unconfirmed(vm))
    if fact.reason is EndReason.REQUEST_FAILED and not refused:
        state = _struck(state, Kind.REQUEST, fact, began=vm.requested_at)
    if fact.reason is EndReason.UNUSED:
        state = renting.with_enough(state, fact.at)
    if fact.lost_at is not None:
        state = _lost(state, vm, fact, fact.lost_at)
    if fact.taken_at is not None:
        state = renting.with_taken(state, vm, fact.at, fact.taken_at, why=fact.detail)
    if fact.reason is EndReason.WORKERS_DIED:
        state = _struck(state, Kind.WORN_VM, fact)
    elif fact.reason is EndReason.UNFIT:
        state, newest = _struck(state, Kind.UNFIT_VM, fact), state.vms.get(state.newest_unfit)
        if newest is None or vm.number > newest.number:
            state = state.changed(newest_unfit=fact.vm)
    if fact.reason not in (EndReason.WORKERS_DIED, EndReason.UNFIT):
        state = _forgiven(state, fact.vm, Progress.VM_LOST)  # that was the end of its trainers
        if _is_last_host(state, fact.vm):
            # Unfit VMs did no harm while one was fit: only those that come now do.
            state = state.changed(strikes=forgive_on_progress(state.strikes, Progress.NONE_FIT))
    ended = replace(vm, status=VmStatus.ENDED, ended_at=fact.at, reason=fact.reason, detail=fact.detail)
    forgotten = {name: _without(fact.vm, getattr(state, name)) for name in ("slow", "given_up")}
    state = _forgiven(state, fact.vm, Progress.VM_ENDED).changed(**forgotten).with_vm(ended)
    return renting.with_ended(state, ended, gone=fact.gone, ran_s=fact.ran_s)


def _forgiven(state: JobState, vm: str, progress: Progress) -> JobState:
    """Without what is forgiven of the VM and of its workers."""
    subjects = {it for _, it in state.strikes.strikes if isinstance(it, str) and vm in (it, vm_of(it))}
    return state.changed(strikes=forgive_on_progress(state.strikes, progress, subjects))


def _struck(state: JobState, kind: Kind, fact: VmEnded, began: float | None = None) -> JobState:
    return state.changed(strikes=strike(state.strikes, kind, JOB, fact.at, by=[fact.vm], began=began))


def _lost(state: JobState, vm: Vm, fact: VmEnded, step: int) -> JobState:
    """VMs that are lost together are lost once; those of the next generation, and those that joined since,
    are another try."""
    why = f"VM {fact.vm}: {fact.reason}" + (f", {fact.detail}" if fact.detail else "")
    strikes = strike(
        state.strikes,
        Kind.LOST_VM,
        JOB,
        fact.at,
        by=[fact.vm],
        began=vm.joined_at,
        step=step,
        generation=state.opened_generation,
        why=why,
    )
    return state.changed(strikes=strikes)


def _is_last_host(state: JobState, vm: str) -> bool:
    """Whether the VM, and none other that lives, has workers of the newest generation that formed."""
    hosts = {vm_of(worker) for worker, _ in state.hosts}
    return vm in hosts and not any(other.vm in hosts for other in state.live_vms if other.vm != vm)


def _without(vm: str, by_worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is known of workers of a VM that has ended."""
    if not any(vm_of(worker) == vm for worker in by_worker):
        return by_worker
    return MappingProxyType({worker: item for worker, item in by_worker.items() if vm_of(worker) != vm})


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    VmRequested: _vm_requested,
    VmJoined: _vm_joined,
    VmNoticed: _noticed,
    VmNoticeWithdrawn: _withdrawn,
    VmDrained: _drained,
    VmYielded: _yielded,
    VmRiskChanged: _risk_changed,
    VmEnded: _vm_ended,
}
