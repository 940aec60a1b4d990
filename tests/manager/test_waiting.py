"""Jobs that wait for a person: when, what becomes of their VMs meanwhile, and how they go on."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from core_script import Script
from makara.manager.cli.progress import answers
from makara.manager.cli.show import describe
from makara.manager.core.commands import ComputePlan, ExportWeights, OpenHead, ReleaseVm, RequestVm
from makara.manager.core.events import (
    CommandStuck,
    HeadDiffers,
    HeadOpened,
    ManagerStarted,
    ResumeRequested,
    StopRequested,
    WeightsExported,
)
from makara.manager.core.facts import (
    GenerationClosed,
    GenerationPlanned,
    JobEnded,
    JobResumed,
    PersonNeeded,
    Resumption,
    WorkerFailed,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import Status, vm_of
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import JobView, job_view
from makara.protocol.messages import CheckpointRef, Failure, Phase, StepMetrics, WorkerReport


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def differs(script: Script, difference: Any, generation: int = 0, *checkpoints: CheckpointRef) -> None:
    script.event(
        HeadDiffers(
            now=script.now,
            generation=script.last(OpenHead).generation,
            difference=difference,
            reason=f"the head {difference}",
            head_generation=generation,
            checkpoints=checkpoints,
        )
    )


def resume(script: Script, how: Resumption) -> None:
    script.event(ResumeRequested(now=script.now, how=how))


def morphing(script: Script) -> list[str]:
    """A job whose generation 1 ran and published step 10, and whose generation 2 is prepared."""
    workers = script.run(2)
    script.report(script.change(workers[0], step=10, published=ref(10)))
    script.report(*(script.change(w, incarnation=2, phase=Phase.IDLE, formed=None) for w in workers[1:]))
    script.answer(2, 1)
    script.prepare()
    return workers


def test_opening_states_what_the_head_must_have() -> None:
    script = Script()
    script.run(2)
    assert (script.last(OpenHead).opened, script.last(OpenHead).checkpoints) == (0, ())
    script = Script()
    morphing(script)
    command = script.last(OpenHead)
    assert (command.generation, command.opened, command.checkpoints) == (2, 1, (ref(10),))


def test_managers_with_copies_of_a_journal_open_a_generation_each_as_itself() -> None:
    script = Script()
    script.start(2)
    other = replace(script, facts=list(script.facts), commands=[], workers=dict(script.workers))
    other.now += 1e-6
    script.prepare()
    other.prepare()
    one, two = script.last(OpenHead), other.last(OpenHead)
    assert (one.generation, one.tried, one.opened) == (two.generation, two.tried, two.opened) == (1, 0, 0)
    assert 0 < one.opener < 2**31
    assert one.opener != two.opener


def test_a_job_whose_head_is_missing_waits_instead_of_starting_over() -> None:
    script = Script()
    morphing(script)
    differs(script, "missing")
    assert script.state.status is Status.WAITING
    waiting = script.state.waiting
    assert waiting is not None
    assert waiting.reason == "the head missing"
    assert waiting.offers == (Resumption.AGAIN, Resumption.RESTART)
    assert script.state.planned is None
    asked, requested = script.count(ComputePlan), script.count(RequestVm)
    for _ in range(60):
        script.wait(1.0)
        script.report()
    assert (script.count(ComputePlan), script.count(RequestVm)) == (asked, requested)
    resume(script, Resumption.FROM_HEAD)
    assert script.state.status is Status.WAITING, "there is no head to go on from"


def test_an_answer_that_came_too_late_to_matter_is_no_reason_to_wait() -> None:
    script = Script()
    script.run(2)
    before = script.state
    script.event(
        HeadDiffers(now=script.now, generation=1, difference="ahead", reason="fenced", head_generation=2)
    )
    assert script.state == before


def test_what_was_put_right_is_tried_again() -> None:
    script = Script()
    morphing(script)
    differs(script, "missing")
    resume(script, Resumption.AGAIN)
    assert script.last(JobResumed).how is Resumption.AGAIN
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()
    command = script.last(OpenHead)
    assert (command.generation, command.opened, command.checkpoints) == (3, 1, (ref(10),))
    script.open(ref(10))
    script.form(10)
    assert script.state.status is Status.RUNNING


def test_a_head_that_is_ahead_is_gone_on_from_when_a_person_says_so() -> None:
    script = Script()
    script.start(2)
    script.prepare()
    differs(script, "ahead", 7, ref(90, 7), ref(80, 6))
    assert script.state.status is Status.WAITING
    assert script.state.published == ()
    resume(script, Resumption.FROM_HEAD)
    assert script.state.published == (ref(80, 6), ref(90, 7))
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()
    command = script.last(OpenHead)
    assert command.generation == 8
    assert (command.opened, set(command.checkpoints)) == (7, {ref(90, 7), ref(80, 6)})
    script.open(ref(90, 7), ref(80, 6))
    script.form(90)
    assert script.state.status is Status.RUNNING


def fenced(script: Script, workers: list[str], **fields: Any) -> None:
    """The head refuses a checkpoint of generation 1, whose rank 0 says so, and another is prepared."""
    step_on(script, workers, 30)
    script.report(script.change(workers[0], fenced=1, **fields))
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.FINISHED])
def test_a_job_whose_head_another_manager_has_opened_asks_a_person(phase: Phase) -> None:
    script = Script()
    workers = script.run(2)
    fenced(script, workers, step=100, phase=phase)
    assert script.last(GenerationPlanned).cause == "its checkpoints are fenced off"
    differs(script, "ahead", 7, ref(90, 7))
    assert script.state.status is Status.WAITING
    assert script.state.running, "what it holds is not lost meanwhile"


def test_a_head_that_is_the_jobs_own_again_is_opened_for_another_generation() -> None:
    script = Script()
    workers = script.run(2)
    fenced(script, workers)
    differs(script, "ahead", 7)
    resume(script, Resumption.AGAIN)
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    asked = script.count(ComputePlan)
    for _ in range(60):
        script.wait(1.0)
        script.report()
    assert script.state.status is Status.RUNNING
    assert script.count(ComputePlan) == asked, "what was said of an earlier generation is past"


def test_a_stop_of_a_job_whose_head_another_manager_has_opened_says_what_is_lost() -> None:
    script = Script()
    workers = script.run(2)
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, step=12, phase=Phase.HELD, fenced=1) for w in workers))
    reason = (
        "as requested, but steps 1 to 12 are not saved: the head of its store is not open for its generation"
    )
    assert script.last(JobEnded).reason.startswith(reason)


def test_a_head_that_is_still_another_managers_is_not_taken_over_by_trying_again() -> None:
    script = Script()
    script.start(2)
    script.prepare()
    differs(script, "ahead", 7, ref(90, 7))
    resume(script, Resumption.AGAIN)
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()
    command = script.last(OpenHead)
    assert command.generation == 8
    assert (command.opened, command.tried) == (0, 1)


def test_what_a_head_lacks_is_not_expected_again_once_a_person_accepts_it() -> None:
    script = Script()
    workers = morphing(script)
    differs(script, "lacks", 1, ref(5))
    resume(script, Resumption.FROM_HEAD)
    script.report(script.change(workers[0], published=ref(10)))  # it says so as long as it lives
    assert script.state.published == (ref(5),)
    script.wait(1.0)
    script.answer(2, 1)
    script.prepare()
    assert script.last(OpenHead).checkpoints == (ref(5),)


def test_steps_that_a_person_did_without_are_no_progress_of_the_job() -> None:
    """Found: deaths after that counted as if the job had already made the steps that it makes again."""
    script = Script()
    workers = morphing(script)
    assert script.observations.newest_step == 10
    differs(script, "ahead", 7, ref(5, 7))
    resume(script, Resumption.FROM_HEAD)
    assert script.observations.newest_step == script.state.progress_step == 5
    failure = Failure(kind="killed", message="signal 9")
    script.report(script.change(workers[0], step=11, phase=Phase.EXITED, failure=failure))
    assert script.last(WorkerFailed).step == 5
    assert script.state.progress_step == 5


def test_where_no_plan_works_and_the_head_is_another_generations_the_planner_is_asked_now_and_then() -> None:
    """Found: it was asked again as soon as it had answered, and each answer was journalled."""
    script = Script()
    workers = script.run(3)
    notice = {"notice_deadline_s": 600.0, "notice": "terminate", "notices_known": True}
    script.extra[vm_of(workers[1])] = notice
    script.report()
    script.answer(2, 1)
    script.prepare()
    script.event(CommandStuck(now=script.now, command="open_head", error="refused", generation=2))
    current = script.state.current
    assert current is not None
    assert current.number == 1 < script.state.head_generation
    before = script.count(ComputePlan)
    for _ in range(60):
        script.wait(1.0)
        script.report()
        if script.observations.planning is not None:
            script.answer_impossible("too little memory")
    assert 1 <= script.count(ComputePlan) - before <= 4


def test_after_starting_over_a_death_is_one_without_progress() -> None:
    script = Script()
    morphing(script)
    differs(script, "missing")
    resume(script, Resumption.RESTART)
    script.workers.clear()
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    failure = Failure(kind="killed", message="signal 9")
    script.report(WorkerReport(worker=workers[0], incarnation=1, phase=Phase.EXITED, failure=failure))
    assert script.last(WorkerFailed).step == 0
    assert script.state.progress_step == 0


def test_starting_over_takes_other_vms_and_no_checkpoint() -> None:
    script = Script()
    morphing(script)
    differs(script, "missing")
    vms = script.state.live_vms
    resume(script, Resumption.RESTART)
    assert not script.state.live_vms
    assert script.count(ReleaseVm) == len(vms)
    assert script.state.published == ()
    script.workers.clear()
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    idle = {"incarnation": 1, "phase": Phase.IDLE, "graph_hash": "5ec7"}
    script.report(*(WorkerReport(worker=w, **idle) for w in workers))
    script.answer(1, 1)
    script.prepare()
    assert script.last(OpenHead).restart
    script.open()
    script.form(0)
    assert script.state.status is Status.RUNNING
    assert not script.state.restarting


def growing() -> tuple[Script, list[str]]:
    """A job whose generation 1 runs on two VMs, and whose generation 2 with a third is prepared."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    newcomer = f"{list(script.state.vms)[2]}.0"
    idle = {"incarnation": 1, "phase": Phase.IDLE, "graph_hash": "5ec7"}
    script.report(WorkerReport(worker=newcomer, **idle))
    script.wait(5.0)
    script.answer(1, 2)
    script.prepare()
    assert script.last(OpenHead).generation == 2
    return script, workers


def stuck(script: Script, generation: int) -> None:
    error = "AccessDenied: not yours"
    script.event(CommandStuck(now=script.now, command="open_head", error=error, generation=generation))


def step_on(script: Script, workers: list[str], seconds: int) -> None:
    for _ in range(seconds):
        script.wait(1.0)
        step = script.workers[workers[0]].step + 1
        script.report(*(script.change(w, step=step) for w in workers))


def test_a_refused_growth_leaves_alone_what_runs_and_is_tried_again() -> None:
    script, workers = growing()
    stuck(script, 2)
    assert script.state.status is Status.RUNNING
    assert script.last(GenerationClosed).number == 2
    assert script.last(GenerationClosed).reason == "open_head: AccessDenied: not yours"
    script.wait(1.0)
    script.answer(1, 2)
    script.prepare()
    assert script.last(OpenHead).generation == 3
    step_on(script, workers, 1500)
    assert not script.state.hold
    assert script.count(PersonNeeded) == 0
    assert len(script.state.live_vms) == 3
    stuck(script, 3)
    script.report(script.change(workers[0], incarnation=2, phase=Phase.IDLE, formed=None))
    script.wait(2.0)
    script.answer(1, 2)
    script.prepare()
    stuck(script, 4)
    assert script.state.status is Status.WAITING, "now nothing runs"


def test_morphs_are_shown_in_order_beside_what_ran_though_one_never_formed() -> None:
    script, _ = growing()
    stuck(script, 2)
    views = shown(script).morphs
    assert [view.generation for view in views] == [1, 2]
    assert [view.before for view in views] == [None, views[0].shape]


def test_a_stop_during_a_refused_growth_saves_where_it_runs() -> None:
    script, workers = growing()
    script.event(StopRequested(now=script.now))
    stuck(script, 2)
    assert script.state.ended is None
    script.report(*(script.change(w, phase=Phase.HELD) for w in workers))
    assert script.last(JobEnded).reason == "as requested"


def test_what_an_earlier_generation_failed_to_do_is_no_reason_to_wait() -> None:
    script = Script()
    morphing(script)
    before = script.state
    stuck(script, 1)
    assert script.state == before
    stuck(script, 2)
    waiting = script.state.waiting
    assert waiting is not None
    script.wait(100.0)
    stuck(script, 2)
    assert script.state.waiting == waiting, "its time does not begin anew"
    resume(script, Resumption.AGAIN)
    stuck(script, 2)
    assert script.state.waiting is None


def shown(script: Script) -> JobView:
    """What users see, had all steps been told."""
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    job.reports = {vm: last_report.report for vm, last_report in script.observations.last_reports.items()}
    step = max((worker.step for worker in script.workers.values()), default=0)
    told = StepMetrics(step=step, generation=1, loss=1.0, grad_norm=1.0, seconds=0.1, samples=4)
    job.add_steps([told], script.now)
    return job_view(job, {}, 0.0)


def lines(script: Script) -> list[str]:
    view = shown(script).model_dump(mode="json")
    return answers(view)[len(view["waiting"]["offers"]) :]


def test_a_waiting_job_says_until_when_its_vms_are_kept_and_which_steps_cannot_be_saved() -> None:
    script, workers = growing()
    script.report(script.change(workers[0], step=25, published=ref(25)))
    differs(script, "missing")
    (kept,) = lines(script)
    assert kept.startswith("its VMs are kept until ")
    step_on(script, workers, 10)
    _, unsaved = lines(script)
    assert unsaved == "steps 26 to 35 cannot be saved as things are, and only its VMs hold them"
    event = describe(script.last(PersonNeeded).model_dump(mode="json"))
    assert f"vms_until={datetime.fromtimestamp(script.last(PersonNeeded).vms_until):%m-%d %H:%M:%S}" in event
    step_on(script, workers, 595)
    script.report(*(script.change(w, phase=Phase.HELD) for w in workers))
    script.wait(1.0)
    assert not script.state.live_vms
    assert lines(script) == ["steps 26 to 630 cannot be saved as things are, and no VM holds them any more"]
    script.workers.clear()
    resume(script, Resumption.AGAIN)
    script.wait(1.0)
    assert shown(script).reason == "waits for VMs (3 asked for): fewer usable VMs than min_nodes (1)"


def test_steps_that_the_head_takes_while_the_job_waits_are_not_called_unsaved() -> None:
    script, workers = growing()
    differs(script, "lacks", 1, ref(5))
    step_on(script, workers, 10)
    assert lines(script) == [
        "its VMs are kept as long as its generation steps, which can publish checkpoints"
    ]


def test_vms_are_kept_as_long_as_a_generation_steps_that_can_publish() -> None:
    script, workers = growing()
    differs(script, "lacks", 1, ref(5))
    assert script.state.status is Status.WAITING
    assert script.state.vms_kept_until is None
    step_on(script, workers, 1500)
    assert not script.state.hold
    assert len(script.state.live_vms) == 3
    script.report(script.change(workers[0], incarnation=2, phase=Phase.IDLE, formed=None))
    assert script.state.current is None
    assert script.state.vms_kept_until == script.now + 600.0
    for _ in range(599):
        script.wait(1.0)
        script.report()
    assert script.state.live_vms
    script.wait(2.0)
    assert not script.state.live_vms


def test_vms_are_kept_for_a_while_then_saved_from_and_released() -> None:
    script, workers = growing()
    differs(script, "missing")
    assert script.state.running, "what runs goes on meanwhile"
    assert script.state.vms_kept_until == script.now + 600.0
    for _ in range(595):
        script.wait(1.0)
        script.report()
    assert not script.state.hold
    assert len(script.state.live_vms) == 3
    for _ in range(10):
        script.wait(1.0)
        script.report()
    assert orders(script.state, workers[0][:-2]).hold
    assert len(script.state.live_vms) == 3
    script.report(*(script.change(w, phase=Phase.HELD) for w in workers))
    script.wait(1.0)
    assert not script.state.live_vms
    assert script.state.status is Status.WAITING
    script.workers.clear()
    script.event(ManagerStarted(now=script.now))
    resume(script, Resumption.AGAIN)
    script.wait(1.0)
    assert len(script.state.live_vms) == 3
    assert not script.state.hold


def test_workers_that_do_not_save_are_not_waited_for_for_ever() -> None:
    script = Script()
    morphing(script)
    differs(script, "missing")
    for _ in range(910):
        script.wait(1.0)
        script.report()
    assert not script.state.live_vms


def test_a_waiting_job_can_be_stopped() -> None:
    script = Script()
    script.start(2)
    script.prepare()
    differs(script, "ahead", 7, ref(90, 7))
    script.event(StopRequested(now=script.now))
    assert script.last(JobEnded).status == "stopped"


def test_a_stop_that_cannot_save_says_so_and_ends() -> None:
    script = Script()
    workers = morphing(script)
    script.report(*(script.change(w, step=12) for w in workers[:1]))
    script.event(StopRequested(now=script.now))
    differs(script, "missing")
    assert script.last(JobEnded).status == "stopped"
    assert "not saved: the head missing" in script.last(JobEnded).reason


def test_weights_that_the_store_refuses_are_exported_when_a_person_says_so() -> None:
    script = Script()
    first, _ = script.run(2)
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    script.event(CommandStuck(now=script.now, command="export_weights", error="AccessDenied"))
    assert script.state.status is Status.WAITING
    waiting = script.state.waiting
    script.wait(50.0)
    script.event(CommandStuck(now=script.now, command="export_weights", error="AccessDenied"))
    assert script.state.waiting == waiting, "its time does not begin anew"
    exports = [command for command in script.commands if isinstance(command, ExportWeights)]
    resume(script, Resumption.AGAIN)
    assert script.state.status is Status.EXPORTING
    again = script.last(ExportWeights)
    assert again.checkpoint == exports[0].checkpoint
    assert again.key != exports[0].key, "a command of the same key is never stored twice"
    script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=100))
    assert script.state.status is Status.FINISHED


def test_weights_of_an_older_step_are_said_to_be_so() -> None:
    script = Script()
    first, _ = script.run(2)
    script.report(script.change(first, step=90, published=ref(90)))
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    assert script.last(ExportWeights).older == (ref(90),)
    script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=90, note="100-g1 is torn"))
    reason = "trained 100 steps, but the weights exported are those of step 90: 100-g1 is torn"
    assert script.last(JobEnded).reason == reason


@pytest.mark.parametrize("difference", ["missing", "lacks", "ahead"])
def test_the_question_survives_a_restart_of_the_manager(difference: str) -> None:
    script = Script()
    morphing(script)
    differs(script, difference, 7, ref(5))
    script.event(ManagerStarted(now=script.now))
    assert script.state.status is Status.WAITING
    script.event(HeadOpened(now=script.now, generation=2, checkpoints=()))  # a command that is run again
    assert script.state.status is Status.WAITING
    assert script.last(GenerationClosed).number == 2
