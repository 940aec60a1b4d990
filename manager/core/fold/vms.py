"""How VMs come and go, and what the deaths of their trainers count for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..facts import (
    EndReason,
    VmEnded,
    VmJoined,
    VmRequested,
    WorkerFailed,
)
from ..failures import Death, Rounds, without_progress
from ..state import JobState, vm_of
from ..vms import Vm, VmStatus
from . import renting
from .notices import without_deaths


def _vm_requested(state: JobState, fact: VmRequested) -> JobState:
    if fact.vm in state.vms:
        return state
    return state.with_vm(Vm(fact.vm, requested_at=fact.at, number=len(state.vms)))


def _vm_joined(state: JobState, fact: VmJoined) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    joined = replace(
        vm, status=VmStatus.JOINED, joined_at=fact.at, address=fact.address, devices=fact.devices
    )
    return renting.with_joined(state.with_vm(joined).changed(request_failures=0), joined)


def _vm_ended(state: JobState, fact: VmEnded) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    counted = vm.requested_at < state.request_failed_at <= fact.at  # not if the clock was set back since
    refused = vm.attempt is not None and vm.attempted_at is None  # that place is left alone, not the others
    if fact.reason is EndReason.REQUEST_FAILED and not counted and not refused:
        # VMs asked for together and refused together are one failure: the wait doubles once, not six times.
        state = state.changed(request_failures=state.request_failures + 1, request_failed_at=fact.at)
    if fact.reason is EndReason.UNUSED:
        state = renting.with_enough(state, fact.at)
    if fact.reason in (EndReason.WORKERS_DIED, EndReason.UNFIT):
        state = state.changed(replaced_at=fact.at)
    if fact.reason is EndReason.WORKERS_DIED:
        state = state.changed(worn_vms=state.worn_vms + 1)
    elif fact.reason is EndReason.UNFIT:
        # Those that came together are one, as for failures; no generation makes a difference here.
        rounds, newest = state.unfit_rounds.failed(fact.at, 0, fact.vm, 0), state.vms.get(state.newest_unfit)
        state = state.changed(unfit_rounds=rounds)
        if newest is None or vm.number > newest.number:
            state = state.changed(newest_unfit=fact.vm)
    if fact.reason not in (EndReason.WORKERS_DIED, EndReason.UNFIT):
        state = without_deaths(state, fact.vm)  # what ended its trainers was the end of the VM
        if _is_last_host(state, fact.vm):
            # Unfit VMs beside one that was fit harmed nobody: only those that come now do.
            state = state.changed(unfit_rounds=Rounds())
    ended = replace(vm, status=VmStatus.ENDED, ended_at=fact.at, reason=fact.reason, detail=fact.detail)
    forgotten = {name: _without(fact.vm, getattr(state, name)) for name in ("slow", "times_slow", "given_up")}
    outdated = frozenset(worker for worker in state.outdated if vm_of(worker) != fact.vm)
    state = state.changed(**forgotten, outdated=outdated).with_vm(ended)
    return renting.with_ended(state, ended, gone=fact.gone)


def _is_last_host(state: JobState, vm: str) -> bool:
    """Whether the VM, and none other that lives, has workers of the newest generation that formed."""
    hosts = {vm_of(worker) for worker, _ in state.hosts}
    return vm in hosts and not any(other.vm in hosts for other in state.live_vms if other.vm != vm)


def _without(vm: str, by_worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is known of workers of a VM that has ended."""
    if not any(vm_of(worker) == vm for worker in by_worker):
        return by_worker
    return MappingProxyType({worker: item for worker, item in by_worker.items() if vm_of(worker) != vm})


def _worker_failed(state: JobState, fact: WorkerFailed) -> JobState:
    state = state.changed(failed=MappingProxyType({**state.failed, fact.worker: fact.incarnation}))
    if fact.step > state.progress_step:
        state = state.changed(progress_step=fact.step, internal_errors=Rounds())
    if fact.kind == "recipe":
        return state.changed(
            unfit=MappingProxyType({**state.unfit, fact.worker: fact.message}), last_error=fact.message
        )
    if fact.kind == "outdated":  # nothing failed: see `core.rules.versions`
        return state.changed(
            given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}),
            outdated=state.outdated | {fact.worker},
        )
    if fact.kind == "stuck":
        state = state.changed(given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}))
        if not fact.counted:
            return _died(state, fact, closed=True)
    elif fact.kind not in ("user", "internal"):
        return _died(state, fact)
    state = state.changed(last_error=fact.message, last_traceback=fact.traceback)
    mark = fact.at, state.last_generation, fact.worker, fact.incarnation
    if fact.kind == "user":
        return state.changed(user_errors=state.user_errors.failed(*mark))
    return state.changed(internal_errors=state.internal_errors.failed(*mark))


def _died(state: JobState, fact: WorkerFailed, *, closed: bool = False) -> JobState:
    """A trainer that a signal, its lease, or not leaving a closed generation ended; of a VM that is gone, or
    was to go, that is no wonder."""
    vm = state.vms.get(vm_of(fact.worker))
    if vm is None or not vm.live or vm.status is VmStatus.NOTICED or fact.own_steps is None:
        return state
    death = Death(
        vm.vm,
        fact.worker,
        fact.incarnation,
        fact.at,
        state.last_generation,
        state.progress_step,
        fact.message,
        closed,
    )
    kept = [d for d in state.deaths if fact.own_steps == 0 or d.vm != vm.vm]
    return state.changed(deaths=(*_still_counted(state, kept), death))


def _still_counted(state: JobState, deaths: Iterable[Death]) -> list[Death]:
    """Those on VMs that live; and of others for as long as the job has not gone on since."""
    live = {vm.vm for vm in state.live_vms}
    newest = without_progress(deaths, state.progress_step)
    return [death for death in deaths if death.vm in live or death in newest]


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    VmRequested: _vm_requested,
    VmJoined: _vm_joined,
    VmEnded: _vm_ended,
    WorkerFailed: _worker_failed,
}
