"""Views of a job's VMs."""

from __future__ import annotations

from pydantic import BaseModel

from ...core.vms import Vm
from ..runtime import Job
from .costs import Costs, VmCost

_MOST_ENDED = 100  # in a job's view


class VmView(BaseModel):
    vm: str
    status: str
    requested_at: float
    joined_at: float | None
    ended_at: float | None
    deadline: float | None
    notice: str  # why it hands over, or may have to: the cloud's word, "drained" or "at risk"
    reason: str | None
    detail: str
    workers: list[str]
    cost: VmCost | None


def vm_view(job: Job, vm: Vm, costs: Costs) -> VmView:
    report = job.reports.get(vm.vm) if vm.live else None
    silent = vm.live and vm.vm in job.observations.unheard
    workers, unfit = report.workers if report is not None else [], job.state.unfit
    unused = "; ".join(f"{w.worker} is not used: {unfit[w.worker]}" for w in workers if w.worker in unfit)
    return VmView(
        vm=vm.vm,
        status=vm.status.value,
        requested_at=vm.requested_at,
        joined_at=vm.joined_at,
        ended_at=vm.ended_at,
        deadline=vm.deadline,
        notice=_notice(vm),
        reason=vm.reason.value if vm.reason is not None else None,
        detail=vm.detail or ("silent" if silent else unused),
        workers=[f"{w.worker}: {'unfit' if w.worker in unfit else w.phase.value}" for w in workers],
        cost=costs.of_vm(vm),
    )


def _notice(vm: Vm) -> str:
    if not vm.live:
        return ""
    if vm.deadline is not None:
        return vm.action or "notice"
    if vm.yielded:
        return vm.yielded
    return "drained" if vm.drained_at is not None else "at risk" if vm.at_risk else ""


def shown_vms(job: Job, costs: Costs) -> list[VmView]:
    """The living VMs and the last that ended, in the order of their requests."""
    vms = {vm.vm: vm for vm in (*job.state.counted_vms, *job.state.vms.ended(-_MOST_ENDED))}
    return [vm_view(job, vm, costs) for vm in sorted(vms.values(), key=lambda vm: vm.number)]
