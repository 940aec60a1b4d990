"""VMs that are to hand over: notices of the cloud and their end, VMs at risk, and drains."""

from __future__ import annotations

from core_script import Script
from makara.manager.core.commands import ComputePlan, ReleaseVm
from makara.manager.core.events import DrainRequested, StopRequested, VmTerminated
from makara.manager.core.facts import (
    CheckpointPublished,
    EndReason,
    GenerationClosed,
    GenerationPlanned,
    HoldChanged,
    JobEnded,
    VmDrained,
    VmEnded,
    VmNoticed,
    VmNoticeWithdrawn,
    VmRequested,
    VmRiskChanged,
)
from makara.manager.core.state import vm_of
from makara.manager.core.vms import VmStatus
from makara.protocol.messages import CheckpointRef, Phase, WorkerReport

NOTICE = {"notice_deadline_s": 30.0, "notice": "terminate", "notices_known": True}
NONE = {"notices_known": True}


def drain(script: Script, vm: str) -> None:
    script.event(DrainRequested(now=script.now, vm=vm))


# ---- withdrawn ---------------------------------------------------------------------------------------------


def test_a_notice_that_is_withdrawn_before_the_planner_answers_changes_nothing() -> None:
    script = Script()
    workers = script.run(4)
    doomed = vm_of(workers[3])
    script.extra[doomed] = NOTICE
    script.report()
    assert script.last(VmNoticed).action == "terminate"
    script.extra[doomed] = NONE
    script.report()
    assert script.last(VmNoticeWithdrawn).vm == doomed
    script.answer(2, 1)
    for _ in range(5):
        script.wait(10.0)
        script.report()
    assert script.num_plans == 1
    assert script.count(VmEnded) == 0
    assert script.state.vms[doomed].status is VmStatus.JOINED


def test_a_plan_in_preparation_for_a_notice_that_is_withdrawn_is_given_up() -> None:
    script = Script()
    workers = script.run(4)
    doomed = vm_of(workers[3])
    script.extra[doomed] = NOTICE
    script.report()
    script.answer(2, 1)
    assert script.state.planned is not None
    script.extra[doomed] = NONE
    script.report()
    assert script.last(GenerationClosed).number == 2
    assert script.state.planned is None
    assert script.state.current is not None
    assert script.state.current.number == 1
    assert script.state.abandoned == 0  # nobody is woken in the middle of a step
    for _ in range(5):
        script.wait(10.0)
        script.report()
    assert script.num_plans == 2
    assert script.count(VmEnded) == 0


def test_workers_need_not_hold_for_a_notice_that_is_withdrawn() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    script.extra[vm_of(workers[1])] = NOTICE
    script.report()
    assert script.state.hold
    script.extra[vm_of(workers[1])] = NONE
    script.report()
    assert not script.last(HoldChanged).hold
    script.wait(10.0)
    script.report()
    assert not script.state.hold
    assert script.num_plans == 1


def test_what_no_plan_did_without_is_told_no_more_once_its_notice_is_withdrawn() -> None:
    """Found: `status` said "no plan ..." of a job that ran on."""
    script = Script()
    workers = script.run(2)
    script.extra[vm_of(workers[1])] = NOTICE
    script.report()
    script.answer_impossible("one worker has too little memory")
    assert script.state.impossible is not None
    script.extra[vm_of(workers[1])] = NONE
    script.report()
    assert script.state.running
    assert script.state.impossible is None


def test_of_two_notices_one_that_is_withdrawn_calls_off_nothing() -> None:
    script = Script()
    workers = script.run(4)
    first, second = vm_of(workers[2]), vm_of(workers[3])
    script.extra |= {first: NOTICE, second: NOTICE}
    script.report()
    script.extra[first] = NONE
    script.report()
    script.answer(1, 1)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    assert script.state.vms[second].status is VmStatus.NOTICED


def test_an_agent_that_has_not_asked_its_cloud_withdraws_nothing() -> None:
    """It began anew under notice, or its cloud does not answer."""
    script = Script()
    workers = script.run(4)
    doomed = vm_of(workers[3])
    script.extra[doomed] = NOTICE
    script.report()
    script.extra[doomed] = {}
    script.report()
    assert script.count(VmNoticeWithdrawn) == 0
    assert script.state.vms[doomed].status is VmStatus.NOTICED


def test_a_notice_that_comes_again_is_one() -> None:
    script = Script()
    workers = script.run(4)
    doomed = vm_of(workers[3])
    for said in (NOTICE, NONE, NOTICE):
        script.extra[doomed] = said
        script.report()
    assert script.count(VmNoticed) == 2
    assert script.state.vms[doomed].status is VmStatus.NOTICED


# ---- at risk -----------------------------------------------------------------------------------------------


def test_a_vm_at_risk_keeps_its_work() -> None:
    script = Script()
    workers = script.run(4)
    risky = vm_of(workers[3])
    script.extra[risky] = {"at_risk": True, "notices_known": True}
    script.report()
    assert script.last(VmRiskChanged).at_risk
    for _ in range(3):
        script.wait(10.0)
        script.report()
    assert script.count(ComputePlan) == 1
    assert script.count(VmEnded) == 0
    script.extra[risky] = NONE
    script.report()
    assert not script.last(VmRiskChanged).at_risk


def test_a_spare_is_asked_for_where_there_is_room_and_only_one() -> None:
    script = Script()
    parallelism = {"pipeline_parallel_degree": 2, "data_parallel_degree": 1}  # no plan uses more than two VMs
    workers = script.run(2, resources={"max_nodes": 4}, parallelism=parallelism)
    for vm in script.state.live_vms[2:]:
        script.refuse(vm.vm)
    requested = script.count(VmRequested)
    script.wait(600.0)
    script.report()
    assert script.count(VmRequested) == requested
    script.extra[vm_of(workers[0])] = {"at_risk": True}
    script.report()
    for _ in range(3):
        script.wait(1.0)
        script.report()
    assert script.count(VmRequested) == requested + 1


def test_no_more_vms_than_the_user_allows_are_asked_for() -> None:
    script = Script()
    workers = script.run(4)
    script.extra[vm_of(workers[0])] = {"at_risk": True}
    script.report()
    script.wait(1.0)
    assert script.count(VmRequested) == 4


# ---- drains ------------------------------------------------------------------------------------------------


def test_a_drained_vm_hands_over_is_released_and_replaced() -> None:
    script = Script()
    workers = script.run(4)
    drained = vm_of(workers[3])
    drain(script, drained)
    script.report()
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    script.answer(2, 1)
    assert workers[3] in dict(script.last(GenerationPlanned).members)  # it hands over what it has
    script.prepare()
    script.open()
    script.report(*(script.change(w, phase=Phase.LEFT) for w in workers[2:]))
    script.form(step=8)
    ended = script.last(VmEnded)
    assert (ended.vm, ended.reason, ended.detail) == (drained, EndReason.RELEASED, "drained")
    assert script.last(ReleaseVm).vm == drained
    script.wait(1.0)
    assert script.count(VmRequested) == 5


def test_a_drain_is_one_however_often_it_is_asked_for() -> None:
    script = Script()
    workers = script.run(4)
    for _ in range(3):
        drain(script, vm_of(workers[3]))
    assert script.count(VmDrained) == 1


def test_a_drained_vm_that_no_plan_does_without_is_released_once_it_has_saved() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    drained = vm_of(workers[1])
    drain(script, drained)
    script.report()
    assert script.state.hold
    script.report(*(script.change(w, phase=Phase.HELD, step=7) for w in workers))
    script.wait(1.0)
    assert script.count(VmEnded) == 0  # nothing of it is in the store yet
    saved = CheckpointRef(step=7, generation=1)
    script.report(script.change(workers[0], published=saved))
    assert script.count(CheckpointPublished) == 1
    assert (script.last(VmEnded).vm, script.last(VmEnded).detail) == (drained, "drained")
    script.wait(1.0)
    assert script.count(VmRequested) == 3


def test_a_noticed_vm_that_never_took_part_makes_room_for_another_while_nothing_runs() -> None:
    """Found: of a notice of fifteen minutes (Azure's `Redeploy`) all of them were waited for."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    lost = vm_of(workers[1])
    script.event(VmTerminated(now=script.now, vm=lost))
    del script.workers[workers[1]]
    script.wait(1.0)
    new = script.last(VmRequested).vm
    script.extra[new] = NOTICE
    script.report(WorkerReport(worker=f"{new}.0", incarnation=1, phase=Phase.IDLE))
    assert (script.last(VmEnded).vm, script.last(VmEnded).reason) == (new, EndReason.RELEASED)
    script.wait(1.0)
    assert script.last(VmRequested).vm not in (new, lost)
    assert script.state.vms[vm_of(workers[0])].live


def test_a_drained_vm_that_never_took_part_is_released_though_nothing_runs() -> None:
    """Found: it was kept for five minutes, and counted, so that no other could be asked for in its place."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    lost = vm_of(workers[1])
    script.event(VmTerminated(now=script.now, vm=lost))
    del script.workers[workers[1]]
    script.wait(1.0)
    new = script.last(VmRequested).vm
    script.report(WorkerReport(worker=f"{new}.0", incarnation=1, phase=Phase.IDLE))
    assert script.state.current is None
    drain(script, new)
    assert (script.last(VmEnded).vm, script.last(VmEnded).detail) == (new, "drained")
    script.wait(1.0)
    assert script.last(VmRequested).vm not in (new, lost)


def test_a_drained_vm_that_alone_holds_steps_is_kept_while_nothing_runs() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    script.report(*(script.change(w, step=7) for w in workers))
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    del script.workers[workers[1]]
    script.report(script.change(workers[0], phase=Phase.BROKEN))
    drain(script, vm_of(workers[0]))
    script.wait(1.0)
    assert script.last(VmEnded).vm == vm_of(workers[1])


def test_a_job_that_is_stopped_saves_on_vms_that_are_to_hand_over() -> None:
    """Found: the steps were lost after five minutes, though the drained VM held them all."""
    script = Script()
    workers = script.start(2, resources={"max_nodes": 2}, parallelism={"pipeline_parallel_degree": 1})
    script.prepare()
    script.open()
    script.form()
    script.report(*(script.change(w, step=7) for w in workers))
    for worker in workers:
        drain(script, vm_of(worker))
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    del script.workers[workers[1]]
    script.report(script.change(workers[0], phase=Phase.BROKEN))
    assert script.state.current is None
    script.event(StopRequested(now=script.now))
    script.wait(1.0)
    script.answer(1, 1)
    planned = script.state.planned
    assert planned is not None
    assert planned.saves_only
    assert [worker for worker, _ in planned.incarnations] == [workers[0]]
    script.wait(1.0)
    assert script.state.planned is planned
    script.prepare()
    script.open()
    script.form(step=7)
    saved = CheckpointRef(step=7, generation=2)
    script.report(script.change(workers[0], phase=Phase.HELD, published=saved))
    script.wait(1.0)
    assert script.last(JobEnded).reason == "as requested"


def test_steps_that_only_vms_under_notice_hold_are_saved_when_too_few_others_stay() -> None:
    """Found: they waited for their end with all that the job had trained since its last checkpoint."""
    script = Script()
    workers = script.start(2, resources={"max_nodes": 2, "min_nodes": 2})
    script.prepare()
    script.open()
    script.form()
    script.report(*(script.change(w, step=7) for w in workers))
    script.extra[vm_of(workers[0])] = NOTICE
    script.report()
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    del script.workers[workers[1]]
    script.report(script.change(workers[0], phase=Phase.BROKEN))
    assert script.state.current is None
    script.wait(1.0)
    script.answer(1, 1)
    planned = script.state.planned
    assert planned is not None
    assert planned.saves_only
    script.prepare()
    script.open()
    script.form(step=7)
    saved = CheckpointRef(step=7, generation=2)
    script.report(script.change(workers[0], phase=Phase.HELD, published=saved))
    script.wait(1.0)
    assert script.state.published == (saved,)
    for _ in range(5):
        script.wait(5.0)
        script.report()
    assert script.num_plans == 2, "once is enough"


def test_a_vm_is_drained_at_once_while_nothing_was_trained() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 2})
    script.wait()
    [first, _] = script.state.vms
    drain(script, first)
    assert script.last(VmEnded).vm == first
    script.wait(1.0)
    assert script.count(VmRequested) == 3


def test_a_notice_that_is_withdrawn_does_not_keep_a_drained_vm() -> None:
    script = Script()
    workers = script.run(4)
    drained = vm_of(workers[3])
    drain(script, drained)
    for said in (NOTICE, NONE):
        script.extra[drained] = said
        script.report()
    assert script.count(VmNoticeWithdrawn) == 1
    assert script.state.vms[drained].status is VmStatus.NOTICED


def test_a_drain_that_nothing_comes_of_ends_all_the_same() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    drain(script, vm_of(workers[1]))
    script.report()
    assert script.state.hold
    script.wait(script.timing.stop_timeout_s / 2)
    script.report()
    assert script.count(VmEnded) == 0
    for _ in range(200):
        script.wait(5.0)
        script.report()
        if script.count(VmEnded):
            break
    assert script.last(VmEnded).vm == vm_of(workers[1])
