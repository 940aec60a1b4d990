"""VMs that are to hand over: the cloud said that it will take them, or a person has them drained."""

from __future__ import annotations

from dataclasses import replace

from ....protocol.messages import Phase, Report
from ..events import DrainRequested
from ..facts import (
    EndReason,
    GenerationClosed,
    HoldChanged,
    VmDrained,
    VmNoticed,
    VmNoticeWithdrawn,
    VmRiskChanged,
)
from ..state import vm_of
from ..turn import Turn
from ..vms import Vm, VmStatus


def take(turn: Turn) -> None:
    """A person's wish to have a VM replaced. One that has not joined has nothing to hand over."""
    event = turn.event
    if not isinstance(event, DrainRequested):
        return
    vm = turn.state.vms.get(event.vm)
    if vm is None or not vm.live or vm.drained_at is not None:
        return
    if vm.joined:
        turn.fact(VmDrained(at=turn.now, vm=vm.vm))
    else:
        turn.end_vm(vm.vm, EndReason.RELEASED, "drained before it joined")


def record(turn: Turn) -> None:
    """What the cloud says of a VM, as its agent reports it; and what it says no more."""
    withdrawn = False
    for vm in turn.state.live_vms:
        pulse = turn.vitals.pulses.get(vm.vm)
        if pulse is None or not vm.joined:
            continue
        report = pulse.report
        if report.notice_deadline_s is not None and vm.deadline is None:
            deadline = pulse.at + report.notice_deadline_s
            turn.fact(VmNoticed(at=turn.now, vm=vm.vm, deadline=deadline, action=report.notice))
        elif vm.deadline is not None and _says_none(report):
            turn.fact(VmNoticeWithdrawn(at=turn.now, vm=vm.vm))
            withdrawn = True
        if report.at_risk != vm.at_risk and (report.at_risk or report.notices_known):
            turn.fact(VmRiskChanged(at=turn.now, vm=vm.vm, at_risk=report.at_risk))
    if withdrawn:
        _call_off(turn)


def _says_none(report: Report) -> bool:
    """Whether the cloud was asked and has no notice; an agent that just began has not asked yet."""
    return report.notices_known and report.notice_deadline_s is None


def _call_off(turn: Turn) -> None:
    """Nothing has to change for VMs that stay: not the plan in preparation, nor are workers to hold.

    A generation whose head is being swapped goes on; it takes the VM in again later.
    """
    state = turn.state
    if state.current is None or not state.active or turn.noticed(state.current.seats):
        return
    if state.hold:
        turn.fact(HoldChanged(at=turn.now, hold=False, reason="the notice was withdrawn"))
    planned = state.planned
    if planned is not None and planned.prepared_at is None and set(state.current.seats) - set(planned.seats):
        reason = "the notice that it was for was withdrawn"
        turn.fact(GenerationClosed(at=turn.now, number=planned.number, reason=reason))
        turn.vitals = replace(turn.vitals, planned_for=frozenset(), cause=None)


def deadline_of(turn: Turn, vm: Vm) -> float | None:
    """When the cloud takes the VM. What was journalled may be of another clock: a report knows better."""
    if vm.deadline is None:
        return None
    deadline, pulse = max(vm.deadline, turn.vitals.started_at), turn.vitals.pulses.get(vm.vm)
    remaining_s = pulse.report.notice_deadline_s if pulse is not None else None
    if pulse is None or remaining_s is None:
        return deadline
    return pulse.at + remaining_s if remaining_s > 0 else min(deadline, pulse.at)


def release(turn: Turn) -> None:
    """A VM that is to hand over is let go as soon as the plan that runs does without it."""
    state = turn.state
    if not state.active:
        return
    needed = set[str]()
    for generation in (state.current, state.planned):
        if generation is not None:
            seats = generation.seats if generation is state.current else generation.members
            needed |= {vm_of(worker) for worker, _ in seats}
    for vm in state.live_vms:
        if vm.status is not VmStatus.NOTICED:
            continue
        if state.running and vm.vm not in needed:
            before = "drained" if vm.deadline is None else "handed over before its notice ran out"
            turn.end_vm(vm.vm, EndReason.RELEASED, before)
        elif vm.drained_at is not None and (
            (vm.vm not in needed and _holds_nothing(turn, vm)) or _may_go(turn, vm, vm.drained_at)
        ):
            turn.end_vm(vm.vm, EndReason.RELEASED, "drained")
        elif _is_in_the_way(turn) and vm.vm not in needed and _holds_nothing(turn, vm):
            turn.end_vm(vm.vm, EndReason.RELEASED, "holds nothing, and its notice keeps others away")


def _is_in_the_way(turn: Turn) -> bool:
    """Whether no other VM can be asked for while those are there that are to hand over, nor a plan comes."""
    state = turn.state
    assert state.spec is not None, "VMs are for submitted jobs"
    return len(state.counted_vms) >= state.spec.resources.max_nodes and state.planned is None


def _holds_nothing(turn: Turn, vm: Vm) -> bool:
    """Whether its workers never took part in a generation, or hold after a checkpoint that is published."""
    published, pulse = turn.state.published, turn.vitals.pulses.get(vm.vm)
    saved = published[-1].step if published else -1
    return pulse is not None and all(
        worker.generation == 0 or (worker.phase is Phase.HELD and worker.step <= saved)
        for worker in pulse.report.workers
    )


def _may_go(turn: Turn, vm: Vm, drained_at: float) -> bool:
    """Whether a drained VM, which no cloud takes, may go though no plan does without it: it has saved, or
    holds nothing, or nothing comes of the wait."""
    state = turn.state
    if state.last_generation == state.started_after:
        return True
    current = state.current.seats if state.current is not None else ()
    seats = [seat for seat in current if vm_of(seat[0]) == vm.vm]
    reports = [report for seat in seats if (report := turn.report_of(seat)) is not None]
    published = state.published[-1].step if state.published else -1
    if state.hold and reports and all(r.phase is Phase.HELD and r.step <= published for r in reports):
        return True
    return turn.save_is_late(drained_at)
