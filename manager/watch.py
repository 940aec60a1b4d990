"""What the list of a provider's VMs means: which of ours are gone, and which are there that nobody wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .effects import Effects
from .providers import VmStatus
from .runtime import Job
from .state import JobState

_PATIENCE = 2  # lists in a row without a VM before it counts as gone: a cloud's lists lag behind


def vanished(
    states: Iterable[JobState],
    effects: Effects,
    provider: str,
    present: Mapping[str, VmStatus],
    missing: dict[str, int],
) -> dict[str, list[str]]:
    """By job, live VMs that `provider` no longer has. `missing` counts absences from call to call."""
    found: dict[str, list[str]] = {}
    for state in states:
        if state.spec is None or state.spec.resources.provider != provider:
            continue
        for vm in state.live_vms:
            if effects.requesting(vm.vm):
                continue
            status = present.get(vm.vm)
            missing[vm.vm] = missing.get(vm.vm, 0) + 1 if status is None else 0
            if status is VmStatus.GONE or missing[vm.vm] >= _PATIENCE:
                found.setdefault(state.job, []).append(vm.vm)
    return found


def unwanted(jobs: Iterable[Job], effects: Effects, present: Mapping[str, VmStatus]) -> list[str]:
    """Running VMs that no job has, and whose release is not under way: left over from the unforeseen."""
    jobs = [job for job in jobs if job.state.ended is None]
    wanted = {vm.vm for job in jobs for vm in job.state.live_vms}
    running = [vm for vm, status in present.items() if status is VmStatus.RUNNING and vm not in wanted]
    return [vm for vm in running if not effects.releasing(vm) and not any(job.may_own(vm) for job in jobs)]
