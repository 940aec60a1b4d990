"""How facts about VMs that are to hand over, or may have to, change a job's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..facts import VmDrained, VmNoticed, VmNoticeWithdrawn, VmRiskChanged
from ..state import JobState
from ..vms import VmStatus


def _noticed(state: JobState, fact: VmNoticed) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    state = without_deaths(state, fact.vm)  # word of its end may come with the first signs of it
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


def _risk_changed(state: JobState, fact: VmRiskChanged) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    return state.with_vm(replace(vm, at_risk=fact.at_risk))


def without_deaths(state: JobState, vm: str) -> JobState:
    deaths = tuple(death for death in state.deaths if death.vm != vm)
    return state.changed(deaths=deaths) if len(deaths) < len(state.deaths) else state


RULES: dict[type[Any], Callable[[JobState, Any], JobState]] = {
    VmNoticed: _noticed,
    VmNoticeWithdrawn: _withdrawn,
    VmDrained: _drained,
    VmRiskChanged: _risk_changed,
}
