"""VMs that are to hand over: the cloud said that it will take them, or a person has them drained.

A notice becomes a fact here (`record`) and makes the VM's status `NOTICED`. What follows from that status is
decided in `planning`: plans no longer use the VM, so another plan is needed (`_need`); if none works without
it, all workers save and hold (`_hold_if_noticed`). A step that would outlast the VM is interrupted
(`switching`). Once the plan that runs does without the VM, `release` lets it go.
"""

from __future__ import annotations

from ....protocol.messages import Phase, Report, WorkerReport
from ..context import Context
from ..events import DrainRequested
from ..facts import (
    EndReason,
    HoldChanged,
    VmDrained,
    VmNoticed,
    VmNoticeWithdrawn,
    VmRiskChanged,
)
from ..state import vm_of
from ..vms import Vm, VmStatus


def take(context: Context) -> None:
    """A person's wish to have a VM replaced. One that has not joined has nothing to hand over."""
    event = context.event
    if not isinstance(event, DrainRequested):
        return
    vm = context.state.vms.live.get(event.vm)
    if vm is None or vm.drained_at is not None:
        return
    if vm.joined:
        context.fact(VmDrained(at=context.now, vm=vm.vm))
    else:
        context.end_vm(vm.vm, EndReason.RELEASED, "drained before it joined")


def record(context: Context) -> None:
    """What the cloud says of a VM, as its agent reports it; and what it says no more."""
    withdrawn = False
    for vm in context.state.live_vms:
        last_report = context.observations.last_reports.get(vm.vm)
        if last_report is None or not vm.joined:
            continue
        report = last_report.report
        if report.notice_deadline_s is not None and vm.deadline is None:
            deadline = last_report.at + report.notice_deadline_s
            context.fact(VmNoticed(at=context.now, vm=vm.vm, deadline=deadline, action=report.notice))
        elif vm.deadline is not None and _says_none(report):
            context.fact(VmNoticeWithdrawn(at=context.now, vm=vm.vm))
            withdrawn = True
        if report.at_risk != vm.at_risk and (report.at_risk or report.notices_known):
            context.fact(VmRiskChanged(at=context.now, vm=vm.vm, at_risk=report.at_risk))
    if withdrawn:
        _call_off(context)


def _says_none(report: Report) -> bool:
    """Whether the cloud was asked and has no notice; an agent that just began has not asked yet."""
    return report.notices_known and report.notice_deadline_s is None


def _call_off(context: Context) -> None:
    """Nothing has to change for VMs that stay: not the plan in preparation, nor are workers to hold.

    A generation whose head is being swapped goes on; it takes the VM in again later.
    """
    state = context.state
    if state.current is None or not state.active or context.noticed(state.current.incarnations):
        return
    if state.hold:
        context.fact(HoldChanged(at=context.now, hold=False, reason="the notice was withdrawn"))
    planned = state.planned
    if planned is None or planned.prepared_at is not None:
        return
    if set(state.current.incarnations) - set(planned.incarnations):
        context.close_planned("the notice that it was for was withdrawn")
        context.note(planned_for=frozenset(), cause=None)


def deadline_of(context: Context, vm: Vm) -> float | None:
    """When the cloud takes the VM. The journalled time may be of another clock, so a report's counts."""
    if vm.deadline is None:
        return None
    deadline = max(vm.deadline, context.observations.started_at)
    last_report = context.observations.last_reports.get(vm.vm)
    remaining_s = last_report.report.notice_deadline_s if last_report is not None else None
    if last_report is None or remaining_s is None:
        return deadline
    return last_report.at + remaining_s if remaining_s > 0 else min(deadline, last_report.at)


def release(context: Context) -> None:
    """A VM that is to hand over is let go as soon as the plan that runs does without it."""
    state = context.state
    if not state.active:
        return
    needed = set[str]()
    for generation in (state.current, state.planned):
        if generation is not None:
            incarnations = generation.incarnations if generation is state.current else generation.members
            needed |= {vm_of(worker) for worker, _ in incarnations}
    for vm in state.live_vms:
        if vm.status is not VmStatus.NOTICED:
            continue
        if state.running and vm.vm not in needed:
            before = _why_drained(vm) if vm.deadline is None else "handed over before its notice ran out"
            context.end_vm(vm.vm, EndReason.RELEASED, before)
        elif vm.drained_at is not None and (
            (vm.vm not in needed and _holds_nothing(context, vm)) or _may_go(context, vm, vm.drained_at)
        ):
            context.end_vm(vm.vm, EndReason.RELEASED, _why_drained(vm))
        elif _is_in_the_way(context) and vm.vm not in needed and _holds_nothing(context, vm):
            context.end_vm(vm.vm, EndReason.RELEASED, "holds nothing, and its notice keeps others away")


def _why_drained(vm: Vm) -> str:
    return vm.yielded or "drained"


def _is_in_the_way(context: Context) -> bool:
    """Whether no other VM can be asked for while those are there that are to hand over, nor a plan comes."""
    state = context.state
    return len(state.counted_vms) >= context.spec.resources.max_nodes and state.planned is None


def _holds_nothing(context: Context, vm: Vm) -> bool:
    """Whether its workers never took part in a generation, or hold after a checkpoint that is published."""
    return vm.vm in context.observations.last_reports and all(
        worker.generation == 0 or _has_saved(context, worker)
        for worker in context.observations.workers_on(vm.vm)
    )


def _may_go(context: Context, vm: Vm, drained_at: float) -> bool:
    """Whether a drained VM, which no cloud takes, may go though no plan does without it: it has saved, or
    holds nothing, or nothing comes of the wait."""
    state = context.state
    if state.last_generation == state.started_after:
        return True
    current = state.current.incarnations if state.current is not None else ()
    reports = context.reports_of(incarnation for incarnation in current if vm_of(incarnation.worker) == vm.vm)
    if state.hold and reports and all(_has_saved(context, report) for report in reports):
        return True
    return context.save_is_late(drained_at)


def _has_saved(context: Context, worker: WorkerReport) -> bool:
    """Whether it holds after a checkpoint that is published."""
    published = context.state.published
    return worker.phase is Phase.HELD and bool(published) and worker.step <= published[-1].step
