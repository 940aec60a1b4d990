"""The core's rules, one at a time."""

from __future__ import annotations

import pytest
from calibrations import uniform
from core_script import MEMORY, RECIPE, Script, plan_json, spec
from makara.manager.core.commands import (
    ComputePlan,
    DeleteCheckpoint,
    ExportWeights,
    OpenHead,
    ReleaseVm,
    RequestVm,
    SweepStore,
)
from makara.manager.core.events import (
    ConnectionClosed,
    HeadSeen,
    JobCommandFailed,
    JobSubmitted,
    ManagerStarted,
    PlanComputed,
    StopRequested,
    VmTerminated,
    WeightsExported,
)
from makara.manager.core.facts import (
    CheckpointPublished,
    CheckpointRetired,
    EndReason,
    GenerationClosed,
    GenerationFormed,
    GenerationOpened,
    GenerationPlanned,
    HoldChanged,
    JobEnded,
    PlanImpossible,
    TrainingFinished,
    VmEnded,
    WorkerFailed,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import Status
from makara.manager.core.strikes.table import Kind
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.manager.spec.start_source import StartSource
from makara.protocol.messages import CheckpointRef, Failure, Phase, Profile, WorkerReport


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def test_a_job_goes_from_submission_to_exported_weights() -> None:
    script = Script()
    assert script.state.status is Status.PENDING
    first, second = script.start()
    assert script.state.status is Status.STARTING
    script.prepare()
    assert script.last(OpenHead).generation == 1
    script.open()
    script.form()
    assert script.state.status is Status.RUNNING
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    assert script.last(TrainingFinished).checkpoint == ref(100)
    assert script.last(ExportWeights).checkpoint == ref(100)
    assert script.state.status is Status.EXPORTING
    script.event(WeightsExported(now=script.now, uri="file:///c/export", sha256="5a", step=100))
    assert script.state.status is Status.FINISHED
    assert script.last(JobEnded).export_sha256 == "5a"
    assert script.count(ReleaseVm) == 2
    assert not script.state.live_vms
    assert orders(script.state, second.partition(".")[0]).action == "shutdown"


def trained(num_vms: int = 2) -> Script:
    """A job whose last step is published, and whose weights the manager exports."""
    script = Script()
    first, *_ = script.run(num_vms, resources={"max_nodes": num_vms})
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    return script


def test_a_trained_job_keeps_no_vms_while_its_weights_are_exported() -> None:
    """Found: the whole fleet was paid for until the manager alone had written the weights."""
    script = trained(3)
    assert script.state.status is Status.EXPORTING
    assert script.count(ReleaseVm) == 3
    assert {fact.reason for fact in script.facts if isinstance(fact, VmEnded)} == {EndReason.RELEASED}
    requested = script.count(RequestVm)
    for _ in range(60):
        script.wait(10.0)
    assert script.count(RequestVm) == requested
    assert script.state.current is None
    script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=100))
    assert script.state.status is Status.FINISHED


def test_a_job_whose_weights_are_being_exported_can_be_stopped() -> None:
    """Found: the stop was answered with 202, and nothing followed."""
    script = trained()
    script.event(StopRequested(now=script.now))
    assert script.state.status is Status.STOPPED
    assert script.last(JobEnded).reason == "as requested; trained 100 steps, whose weights are not exported"
    late = script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=100))
    assert not late.facts


def test_refused_vms_are_asked_for_again_after_a_growing_wait() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 3})
    script.wait()
    assert script.count(RequestVm) == 3
    script.now += 1
    for vm in list(script.state.vms):
        script.refuse(vm)
    assert script.state.strikes.count(Kind.REQUEST) == 1  # refused together: one failure
    script.wait(2.0)
    assert script.count(RequestVm) == 3
    script.wait(4.1)
    assert script.count(RequestVm) == 6
    script.refuse()
    assert script.state.strikes.count(Kind.REQUEST) == 2
    script.wait(5.1)
    assert script.count(RequestVm) == 6
    script.wait(5.1)
    assert script.count(RequestVm) == 7


def test_a_death_closes_the_generation_and_the_next_one_is_planned_without_it() -> None:
    script = Script()
    workers = script.run(4)
    dead = script.state.vms[workers[1].partition(".")[0]]
    script.report(*(script.change(w, step=7) for w in workers))
    script.event(VmTerminated(now=script.now, vm=dead.vm))
    assert script.state.current is None
    assert script.state.abandoned == 1
    assert script.last(VmEnded).reason is EndReason.PREEMPTED
    asked = script.last(ComputePlan)
    assert asked.generation == 2
    assert [slot.worker for slot in asked.workers] == [w for w in workers if w != workers[1]]
    script.answer(2, 1)
    planned = script.last(GenerationPlanned)
    assert planned.cause == f"lost {workers[1]}"
    # The third survivor holds sections that the others may need: it takes part as a donor.
    assert [w for w, _ in planned.members] == [workers[0], workers[2], workers[3]]
    del script.workers[workers[1]]
    script.prepare()
    script.open(ref(5))
    script.form(step=5)
    assert script.last(GenerationFormed).lost_steps == 2
    assert script.state.status is Status.RUNNING
    script.wait()
    assert len(script.state.live_vms) == 4  # the dead VM was replaced


def test_a_trainer_that_was_started_again_is_another_worker() -> None:
    script = Script()
    workers = script.run(2)
    fresh = WorkerReport(worker=workers[1], incarnation=2, phase=Phase.IDLE, graph_hash="5ec7")
    script.report(fresh)
    assert script.last(GenerationClosed).reason == f"lost {workers[1]}"
    script.answer(2, 1)
    assert script.last(GenerationPlanned).members == ((workers[0], 1), (workers[1], 2))


def test_a_broken_generation_waits_a_moment_for_the_death_to_be_seen() -> None:
    script = Script()
    workers = script.run(4)
    lost = workers[3]
    script.report(
        *(script.change(w, phase=Phase.BROKEN, lost=[lost]) for w in workers[:3]), silent=(lost[:-2],)
    )
    assert script.state.current is not None
    script.wait(0.5)
    script.event(ConnectionClosed(now=script.now, vm=lost[:-2]))
    script.wait(0.8)
    assert script.state.running  # it may be back any moment
    script.wait(0.2)
    assert script.state.current is None
    script.wait(0.5)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    assert script.count(VmEnded) == 0


def test_a_generation_is_not_late_while_the_step_before_it_is_under_way() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    newcomer = WorkerReport(worker=f"{list(script.state.vms)[2]}.0", incarnation=1, phase=Phase.IDLE)
    script.report(newcomer.model_copy(update={"graph_hash": "5ec7"}))
    script.wait(5.0)
    script.answer(1, 2)
    script.prepare()
    script.open()
    opened = script.state.current
    assert opened is not None
    forming = {"phase": Phase.FORMING, "generation": opened.number}
    for _ in range(40):  # a step of ten minutes: the first workers cannot switch before its end
        script.report()
        script.wait(15.0)
    assert script.state.current == opened
    script.report(*(script.change(w, **forming) for w in workers))
    for _ in range(36):
        script.report()
        script.wait(5.0)
    assert script.state.current == opened
    for _ in range(3):
        script.report()
        script.wait(5.0)  # but forming itself must not stand still for longer; then stacks are waited for
    assert script.last(GenerationClosed).reason == "did not form: no progress for 190 s"


def test_a_closed_connection_alone_is_no_death() -> None:
    script = Script()
    workers = script.run(2)
    script.event(ConnectionClosed(now=script.now, vm=workers[0][:-2]))
    script.wait(5.0)
    assert script.state.running
    assert script.count(VmEnded) == 0


def test_without_a_known_death_the_accused_is_left_out_for_a_while() -> None:
    script = Script()
    workers = script.run(4)
    broken = [
        script.change(w, phase=Phase.BROKEN, generation=1, lost=[workers[2]])
        for w in workers
        if w != workers[2]
    ]
    script.report(*broken)
    script.wait(2.0)
    assert script.state.current is None
    assert workers[2] not in [slot.worker for slot in script.last(ComputePlan).workers]
    script.answer(2, 1)
    assert workers[2] not in [w for w, _ in script.last(GenerationPlanned).members]


def test_when_everybody_lost_everybody_nobody_is_left_out() -> None:
    script = Script()
    workers = script.run(4)
    script.report(
        *(script.change(w, phase=Phase.BROKEN, lost=[o for o in workers if o != w]) for w in workers)
    )
    script.wait(2.0)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers


def test_a_manager_that_was_suspended_does_not_take_its_own_silence_for_a_massacre() -> None:
    script = Script()
    script.run(2)
    script.wait(1.0)
    script.wait(3600.0)
    assert script.count(VmEnded) == 0


def test_after_a_restart_every_lease_begins_anew_and_nothing_is_planned_before_vms_are_heard() -> None:
    script = Script()
    script.run(2)
    script.now += 3600.0
    script.event(ManagerStarted(now=script.now))
    before = len(script.facts)
    script.wait(1.0)
    script.report()
    script.wait(5.0)
    assert script.facts[before:] == []
    assert script.count(ComputePlan) == 1


def test_newcomers_are_gathered_and_the_old_generation_steps_on_until_they_are_prepared() -> None:
    script = Script()
    script.run(2, resources={"max_nodes": 4})
    third, fourth = [f"{vm}.0" for vm in script.state.vms][2:]
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(1.0)
    assert script.count(ComputePlan) == 1  # the fourth may come any moment
    script.report(WorkerReport(worker=fourth, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    assert script.count(ComputePlan) == 2
    script.answer(2, 2)
    assert script.last(GenerationPlanned).cause == f"{third}, {fourth} joined"
    assert script.state.running
    assert orders(script.state, third[:-2]).generation is not None
    script.prepare()
    script.open()
    assert script.state.abandoned == 0
    script.report(*(script.change(w, step=9) for w in list(script.workers)[:2]))
    script.form(step=9)
    assert script.last(GenerationFormed).lost_steps == 0
    assert script.state.history[-1].end_reason == "superseded by 2"


def test_a_planner_that_answers_with_what_runs_moves_nothing() -> None:
    script = Script()
    workers = script.start(3)
    script.prepare()
    script.open()
    script.form()
    before = len(script.facts)
    script.wait(10.0)
    script.report()
    assert script.count(ComputePlan) == 1
    spare = workers[2]
    fresh = WorkerReport(worker=spare, incarnation=2, phase=Phase.IDLE, graph_hash="5ec7")
    script.report(fresh)
    script.wait(10.0)
    script.report()
    assert script.count(ComputePlan) == 2
    script.answer(2, 1)
    for _ in range(5):
        script.wait(10.0)
        script.report()
    assert script.count(ComputePlan) == 2
    assert script.facts[before:] == []


def test_a_notice_moves_the_work_away_and_lets_the_vm_go() -> None:
    script = Script()
    workers = script.run(4)
    doomed = workers[3][:-2]
    script.extra[doomed] = {"notice_deadline_s": 30.0}
    script.report()
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    script.answer(2, 1)
    assert script.state.current is not None  # the old generation steps on meanwhile
    assert [w for w, _ in script.last(GenerationPlanned).members] == [
        workers[0],
        workers[1],
        workers[2],
        workers[3],
    ]
    script.prepare()
    script.open()
    assert script.state.abandoned == 0
    script.report(*(script.change(w, phase=Phase.LEFT) for w in workers[2:]))
    script.form(step=8)
    assert script.last(VmEnded).vm == doomed
    assert script.last(VmEnded).reason is EndReason.RELEASED


def test_a_notice_for_a_vm_that_is_needed_has_a_checkpoint_made_first() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    script.extra[workers[1][:-2]] = {"notice_deadline_s": 30.0}
    script.report()
    assert script.last(HoldChanged).hold
    assert orders(script.state, workers[0][:-2]).hold
    assert script.count(HoldChanged) == 1


def test_workers_that_held_though_nobody_told_them_go_on_in_a_new_generation() -> None:
    """Their agents did not see the manager for long, or did not understand it; all members hold with one."""
    script = Script()
    workers = script.run(2)
    script.report(*(script.change(w, phase=Phase.HELD, step=7) for w in workers))
    assert script.last(GenerationClosed).reason == f"{workers[0]} held without an order"
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form(step=7)
    assert script.state.current is not None
    assert script.state.current.number == 2
    assert script.state.current.formed is not None


def test_an_unprepared_member_is_left_out_in_the_end() -> None:
    script = Script()
    workers = script.start(2)
    script.report(script.change(workers[0], prepared=1, endpoint="10.0.0.1:1"))
    for _ in range(125):
        script.wait(1.0)
        script.report()
        if script.count(GenerationClosed):
            break
    assert workers[1] in script.last(GenerationClosed).reason
    assert [slot.worker for slot in script.last(ComputePlan).workers] == [workers[0]]


def test_a_head_swapped_in_vain_forces_another_generation() -> None:
    script = Script()
    workers = script.start(3)
    script.prepare()
    script.open()
    script.form()
    script.report(WorkerReport(worker=workers[2], incarnation=2, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    asked = script.last(ComputePlan)
    plan = {"plan": {**script.state.current.plan, "generation": 2}} if script.state.current else {}
    script.event(
        PlanComputed(
            now=script.now,
            generation=asked.generation,
            asked=asked.asked,
            workers=(workers[0], workers[2]),
            **plan,
        )
    )
    script.prepare()
    assert script.last(OpenHead).generation == 2
    script.event(VmTerminated(now=script.now, vm=workers[2][:-2]))
    assert script.state.running  # generation 1 steps on: nobody was woken
    assert script.state.abandoned == 0
    assert script.last(ComputePlan).generation == 3  # but it may publish nothing any more
    script.answer(2, 1)
    assert script.last(GenerationPlanned).number == 3


def test_the_newest_checkpoints_and_the_base_are_kept() -> None:
    script = Script()
    first, _ = script.start(2)
    script.prepare()
    script.open(ref(5, 0))
    script.form(step=5)
    for step in (10, 20, 30, 40):
        script.report(script.change(first, step=step, published=ref(step)))
    assert script.state.published == (ref(5, 0), ref(30), ref(40))
    assert [f.checkpoint for f in script.facts if isinstance(f, CheckpointRetired)] == [ref(10), ref(20)]
    assert script.last(DeleteCheckpoint).not_before == script.now + script.timing.delete_after_s
    script.report(script.change(first, published=ref(10)))
    assert script.count(CheckpointPublished) == 5


def test_publications_that_nobody_reported_are_retired_once_the_head_is_seen() -> None:
    script = Script()
    workers = script.run(2)
    for _ in range(61):
        script.wait(1.0)
        script.report()
    swept = script.last(SweepStore)
    script.report(script.change(workers[0], published=ref(20)))
    listed = [ref(step) for step in (50, 40, 30, 20)]
    script.event(HeadSeen(now=script.now, generation=1, checkpoints=tuple(listed)))
    retired = [fact.checkpoint for fact in script.facts if isinstance(fact, CheckpointRetired)]
    assert retired == [ref(20), ref(30)]
    assert script.state.published == (ref(40), ref(50))
    for _ in range(1800):
        script.wait(1.0)
        script.report()
    again = script.last(SweepStore)
    assert again.key != swept.key
    assert script.count(SweepStore) == 2


def test_the_store_is_looked_through_once_more_after_the_end() -> None:
    script = Script()
    script.run(2)
    assert script.count(SweepStore) == 0
    script.event(JobCommandFailed(now=script.now, command="open_head", error="a fault of ours"))
    assert script.last(SweepStore).not_before == script.now + script.timing.delete_after_s
    script = Script()
    script.start(2)
    script.event(JobCommandFailed(now=script.now, command="compute_plan", error="a fault of ours"))
    assert script.count(SweepStore) == 0, "the head was never opened"


@pytest.mark.parametrize("end", ["finished", "stopped"])
def test_only_the_newest_checkpoints_are_kept_after_the_end(end: str) -> None:
    script = Script()
    first, second = script.start(2)
    script.prepare()
    script.open(ref(5, 0))
    script.form(step=5)
    for step in (10, 20):
        script.report(script.change(first, step=step, published=ref(step)))
    if end == "finished":
        script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
        script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=100))
        kept = ref(20), ref(100)
    else:
        script.event(StopRequested(now=script.now))
        held = {"step": 30, "phase": Phase.HELD}
        script.report(script.change(second, **held), script.change(first, **held, published=ref(30)))
        kept = ref(20), ref(30)
    assert script.last(JobEnded).status == end
    assert script.state.published == kept
    assert script.state.retired == (1, 10), "the base as well: nothing starts from it any more"


def test_after_the_end_the_store_is_swept_until_all_that_is_to_go_is_gone() -> None:
    script = Script()
    first, _ = script.run(2)
    for step in (10, 20):
        script.report(script.change(first, step=step, published=ref(step)))
    script.event(JobCommandFailed(now=script.now, command="open_head", error="a fault of ours"))

    def seen(*steps: int, leaving: int) -> int:
        script.wait(60.0)
        listed = tuple(map(ref, steps))
        script.event(HeadSeen(now=script.now, generation=1, checkpoints=listed, leaving=leaving))
        return script.count(SweepStore)

    assert seen(30, 20, 10, leaving=0) == 2, "nobody had reported 30"
    assert script.state.published == (ref(20), ref(30))
    assert seen(30, 20, leaving=1) == 3, "10 has left the head only now"
    assert seen(30, 20, leaving=0) == 3
    keys = [command.key for command in script.commands if isinstance(command, SweepStore)]
    assert len(set(keys)) == 3, "a command of the same key is never stored twice"


def test_what_a_failed_copy_has_left_is_looked_for_after_the_end() -> None:
    script = Script()
    start = StartSource(uri="file:///c", job="other", recipe=RECIPE)
    script.event(JobSubmitted(now=script.now, job="j", spec=spec(), bundle_sha256="b0", start=start))
    script.event(JobCommandFailed(now=script.now, command="copy_checkpoint", error="no room"))
    assert script.last(JobEnded).status == "failed"
    assert script.count(SweepStore) == 1


def test_stop_waits_for_the_checkpoint_then_releases_everything() -> None:
    script = Script()
    workers = script.run(2)
    script.event(StopRequested(now=script.now))
    assert script.state.status is Status.STOPPING
    assert orders(script.state, workers[0][:-2]).hold
    script.report(script.change(workers[0], phase=Phase.HELD, published=ref(3)))
    assert script.state.ended is None
    script.report(script.change(workers[1], phase=Phase.HELD))
    assert script.last(JobEnded).status == "stopped"
    assert script.count(ReleaseVm) == 2


def test_stop_before_anything_runs_ends_at_once() -> None:
    script = Script()
    script.submit()
    script.wait()
    script.event(StopRequested(now=script.now))
    assert script.last(JobEnded).status == "stopped"
    assert script.count(ReleaseVm) == 2


def test_errors_of_the_users_code_are_counted_against_its_allowance() -> None:
    script = Script()
    workers = script.run(2)
    failure = Failure(kind="user", message="ValueError: boom", traceback="Traceback ...")
    # Both replicas raise on the same step: that is one error.
    script.report(*(script.change(w, phase=Phase.EXITED, failure=failure) for w in workers))
    assert script.count(WorkerFailed) == 2
    assert script.state.ended is None
    script.now += 5.0
    script.report(
        WorkerReport(worker=workers[0], incarnation=2, phase=Phase.EXITED, failure=failure),
    )
    assert script.last(JobEnded).status == "failed"
    assert script.last(JobEnded).traceback == "Traceback ..."
    assert not script.state.live_vms


def saved_before_it_failed() -> tuple[Script, list[str]]:
    """Two replicas are at step 25, five more than a checkpoint has, when one raises a second time."""
    script = Script()
    workers = script.run(4, retry={"max_restarts_on_errors": 0})
    published = CheckpointRef(step=20, generation=1)
    script.report(
        *(script.change(w, step=20) for w in workers), script.change(workers[0], published=published)
    )
    failure = Failure(kind="user", message="ValueError: boom", traceback="Traceback ...")
    script.report(
        *(script.change(w, step=25, phase=Phase.BROKEN, lost=[workers[3]]) for w in workers[:3]),
        script.change(workers[3], step=25, phase=Phase.EXITED, failure=failure),
    )
    return script, workers


def test_a_job_that_fails_has_its_newest_steps_saved_first() -> None:
    """Found: steps since the last checkpoint were lost although workers that lived held all of them."""
    script, workers = saved_before_it_failed()
    assert script.state.status is Status.STOPPING
    assert {slot.worker for slot in script.last(ComputePlan).workers} == set(workers[:3])
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    assert job_view(job, {}, 0.0).reason == "fails, once its workers have saved their steps: ValueError: boom"
    script.answer(2, 1)
    script.prepare()
    script.open(CheckpointRef(step=20, generation=1))
    vm = workers[0].rpartition(".")[0]
    order = orders(script.state, vm).generation
    assert order is not None
    assert order.saves_only, "what failed would fail again"
    script.form(25)
    saved = CheckpointRef(step=25, generation=2)
    script.report(*(script.change(w, phase=Phase.HELD, published=saved) for w in workers[:2]))
    ended = script.last(JobEnded)
    assert (ended.status, ended.reason, ended.traceback) == ("failed", "ValueError: boom", "Traceback ...")
    assert script.state.published[-1] == saved
    assert not script.state.live_vms


def test_a_job_that_fails_and_cannot_save_says_which_steps_are_lost() -> None:
    script, _ = saved_before_it_failed()
    while script.state.ended is None and script.now < 100.0 + 2 * script.timing.stop_timeout_s:
        script.wait(5.0)  # no plan comes
        script.report()
    reason = script.last(JobEnded).reason
    assert reason == "ValueError: boom, but steps 21 to 25 are not saved"
    assert script.last(JobEnded).status == "failed"


def unsaved() -> tuple[Script, list[str]]:
    """A job that runs at step 25; the newest checkpoint is of step 20."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    published = CheckpointRef(step=20, generation=1)
    script.report(script.change(workers[0], step=25, published=published), script.change(workers[1], step=25))
    return script, workers


def newcomer(script: Script) -> str:
    """The third VM has joined, and the planner is asked about it."""
    third = f"{list(script.state.vms)[2]}.0"
    asked = script.count(ComputePlan)
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    assert script.count(ComputePlan) == asked + 1
    return third


def planner_fails(script: Script) -> None:
    key = script.last(ComputePlan).key
    script.event(JobCommandFailed(now=script.now, command="compute_plan", error="AssertionError: k", key=key))


def test_a_plan_that_runs_goes_on_though_the_planner_fails_which_is_asked_again() -> None:
    """Found: one assertion of the planner ended a job that stepped, and nothing was saved."""
    script, workers = unsaved()
    newcomer(script)
    asked = script.count(ComputePlan)
    planner_fails(script)
    assert script.state.running
    assert script.last(PlanImpossible).reason == "compute_plan: AssertionError: k"
    script.wait(script.timing.replan_s - 1.0)
    script.report()
    assert script.count(ComputePlan) == asked
    script.wait(1.0)
    assert script.count(ComputePlan) == asked + 1
    script.answer(1, 3)
    assert script.state.planned is not None
    assert script.state.ended is None
    assert {worker for worker, _ in script.state.planned.members} > set(workers)


def test_where_the_planner_fails_for_those_that_stay_all_save_before_a_vm_is_taken() -> None:
    script, workers = unsaved()
    script.extra[workers[1][:-2]] = {"notice_deadline_s": 60.0, "notice": "terminate"}
    script.report()
    planner_fails(script)
    script.report()
    assert script.state.hold


@pytest.mark.parametrize("command", ["open_head", "request_vm"])
def test_workers_save_before_a_fault_in_a_command_ends_the_job(command: str) -> None:
    """Found: the VMs went at once, with all steps since the last checkpoint."""
    script, workers = unsaved()
    workers.append(newcomer(script))
    script.answer(1, 3)
    script.prepare()
    script.event(JobCommandFailed(now=script.now, command=command, error="a fault of ours"))
    assert script.state.status is Status.STOPPING
    assert orders(script.state, workers[0][:-2]).hold
    if command == "request_vm":
        script.open()
        script.form(step=25)
    number = script.state.last_generation if command == "request_vm" else 1
    saved = CheckpointRef(step=25, generation=number)
    script.report(*(script.change(w, phase=Phase.HELD, generation=number, published=saved) for w in workers))
    ended = script.last(JobEnded)
    assert (ended.status, ended.reason) == ("failed", f"{command}: a fault of ours")
    assert script.state.published[-1] == saved


def test_a_failure_on_the_way_to_the_save_does_not_hide_why_a_job_fails() -> None:
    script, _ = saved_before_it_failed()
    script.answer(2, 1)
    script.prepare()
    script.event(JobCommandFailed(now=script.now, command="open_head", error="the store is gone"))
    ended = script.last(JobEnded)
    assert ended.reason == "ValueError: boom, but steps 21 to 25 are not saved: open_head: the store is gone"
    assert ended.traceback == "Traceback ..."


def test_a_vm_that_will_be_taken_is_replaced_before_it_goes() -> None:
    """Found: where the job file fixes P and D, nobody was asked for until the VM was gone."""
    script = Script()
    fixed = {"pipeline_parallel_degree": 2, "data_parallel_degree": 1}
    script.submit(resources={"max_nodes": 3}, parallelism=fixed)
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms][:2]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    third = list(script.state.vms)[2]
    script.event(VmTerminated(now=script.now, vm=third))
    before = script.count(RequestVm)
    script.wait(60.0)
    assert script.count(RequestVm) == before
    script.extra[workers[0][:-2]] = {"notice_deadline_s": 600.0}
    script.report()
    script.wait(1.0)
    assert script.count(RequestVm) == before + 1


def test_a_job_that_fails_where_nobody_holds_all_sections_ends_at_once() -> None:
    script = Script()
    first, second = script.run(2, retry={"max_restarts_on_errors": 0})
    failure = Failure(kind="user", message="ValueError: boom", traceback="Traceback ...")
    script.report(
        script.change(first, step=25, phase=Phase.BROKEN, lost=[second]),
        script.change(second, step=25, phase=Phase.EXITED, failure=failure),
    )
    assert script.last(JobEnded).reason == "ValueError: boom"


def test_faults_of_ours_are_bounded() -> None:
    script = Script()
    workers = script.run(2)
    for _ in range(5):
        assert script.state.ended is None
        script.now += 20.0
        incarnation = script.workers[workers[0]].incarnation + 1
        failure = Failure(kind="internal", message="it fell over")
        script.report(
            WorkerReport(worker=workers[0], incarnation=incarnation, phase=Phase.EXITED, failure=failure)
        )
    assert "5 failures without a new step" in script.last(JobEnded).reason


def test_setup_that_fails_replaces_the_vm() -> None:
    script = Script()
    script.submit()
    script.wait()
    vm = next(iter(script.state.vms))
    failure = Failure(kind="user", message="setup: pip: no such package", traceback="...")
    script.report(WorkerReport(worker=f"{vm}.0", incarnation=0, phase=Phase.EXITED, failure=failure))
    assert script.last(ReleaseVm).vm == vm
    assert script.state.ended is None


def test_why_nothing_runs_is_told_once() -> None:
    script = Script()
    workers = script.run(2)
    script.event(VmTerminated(now=script.now, vm=workers[0][:-2]))
    script.event(VmTerminated(now=script.now, vm=workers[1][:-2]))
    for _ in range(3):
        script.wait(1.0)
    assert script.count(PlanImpossible) == 1
    assert "min_nodes (1)" in script.last(PlanImpossible).reason


def test_what_the_planner_finds_impossible_is_told_and_tried_again_later() -> None:
    script = Script()
    workers = script.run(2)
    script.event(VmTerminated(now=script.now, vm=workers[0][:-2]))
    for seconds in (0.0, 1.0, 31.0):
        script.now += seconds
        script.report(silent=(workers[0][:-2],))
        script.wait()
        asked = script.last(ComputePlan)
        script.event(
            PlanComputed(
                now=script.now,
                generation=asked.generation,
                asked=asked.asked,
                plan=None,
                reason="too little memory",
            )
        )
    assert script.count(PlanImpossible) == 1
    assert script.last(PlanImpossible).reason == "too little memory"
    assert script.count(ComputePlan) == 3


def test_the_cap_on_device_memory_reaches_the_planner() -> None:
    script = Script()
    script.start(2, resources={"max_nodes": 2, "device_memory": "200MB"})
    assert {slot.memory_bytes for slot in script.last(ComputePlan).workers} == {200_000_000}
    script = Script()
    script.start(2)
    assert {slot.memory_bytes for slot in script.last(ComputePlan).workers} == {MEMORY}


@pytest.mark.parametrize("command", ["open_head", "export_weights"])
def test_a_command_that_cannot_succeed_fails_the_job(command: str) -> None:
    script = Script()
    script.run(2)
    script.event(JobCommandFailed(now=script.now, command=command, error="credentials refused"))
    assert script.last(JobEnded).reason == f"{command}: credentials refused"
    assert script.count(ReleaseVm) == 2


def test_a_final_checkpoint_found_in_the_head_ends_the_training() -> None:
    script = Script()
    script.start(2)
    script.prepare()
    script.open(ref(100, 0))
    assert script.last(TrainingFinished).checkpoint == ref(100, 0)
    assert script.count(GenerationOpened) == 1


def test_an_orphan_that_ends_itself_is_not_waited_for() -> None:
    script = Script()
    workers = script.run(2)
    script.extra[workers[1][:-2]] = {"leaving": "orphaned"}
    script.report()
    assert script.last(VmEnded).reason is EndReason.LEFT


def test_a_finished_worker_whose_rank_0_died_takes_part_again() -> None:
    # Its own parts are stored, but nobody knows whether the final checkpoint was published: the head does.
    script = Script()
    workers = script.run(2)
    script.report(script.change(workers[1], step=100, phase=Phase.FINISHED))
    script.event(VmTerminated(now=script.now, vm=workers[0][:-2]))
    assert script.count(TrainingFinished) == 0
    script.answer(1, 1)
    del script.workers[workers[0]]
    script.prepare()
    script.open(ref(100))
    assert script.last(TrainingFinished).checkpoint == ref(100)


def test_a_survivor_that_was_told_to_leave_still_hands_over_what_it_holds() -> None:
    script = Script()
    workers = script.run(4)
    script.event(VmTerminated(now=script.now, vm=workers[3][:-2]))
    del script.workers[workers[3]]
    script.report(*(script.change(w, phase=Phase.IDLE, generation=1) for w in workers[:3]))
    script.answer(2, 1)
    assert [w for w, _ in script.last(GenerationPlanned).members] == workers[:3]


def test_stop_during_a_switch_waits_for_the_generation_that_can_still_publish() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    third = f"{list(script.state.vms)[2]}.0"
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.answer(1, 3)
    script.prepare()
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, phase=Phase.HELD) for w in workers))
    assert script.state.ended is None  # what they saved in generation 1 may have been refused
    script.open()
    script.form(step=4)
    assert script.state.ended is None
    script.report(*(script.change(w, phase=Phase.HELD, generation=2) for w in script.workers))
    assert script.last(JobEnded).status == "stopped"


def test_stop_after_a_death_waits_for_the_survivors_to_save_what_only_they_hold() -> None:
    script = Script()
    workers = script.run(2)
    script.report(*(script.change(w, step=7) for w in workers))
    dead = workers[1]
    script.event(VmTerminated(now=script.now, vm=dead.rpartition(".")[0]))
    del script.workers[dead]
    script.event(StopRequested(now=script.now))
    assert script.state.ended is None
    assert script.last(ComputePlan).generation == 2
    script.answer(1, 1)
    script.prepare()
    script.open()
    script.form(step=7)
    script.report(script.change(workers[0], phase=Phase.HELD, generation=2, published=ref(8, 2)))
    assert script.last(JobEnded).status == "stopped"
    assert script.state.published[-1] == ref(8, 2)


def test_stop_after_a_death_ends_at_once_when_nothing_is_unsaved() -> None:
    script = Script()
    workers = script.run(2)
    script.report(*(script.change(w, step=7, published=ref(7)) for w in workers))
    script.event(VmTerminated(now=script.now, vm=workers[1].rpartition(".")[0]))
    script.event(StopRequested(now=script.now))
    assert script.last(JobEnded).status == "stopped"


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_what_was_impossible_before_a_stop_does_not_keep_survivors_from_saving(min_nodes: int) -> None:
    """Found: "fewer usable VMs than min_nodes" had been told, and the stop lost what the survivor held."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": min_nodes})
    script.report(*(script.change(w, step=7) for w in workers))
    script.event(VmTerminated(now=script.now, vm=workers[1].rpartition(".")[0]))
    del script.workers[workers[1]]
    script.report(script.change(workers[0], phase=Phase.BROKEN))
    none = PlanComputed(
        now=script.now,
        generation=2,
        asked=frozenset({workers[0]}),
        plan=None,
        reason="too little memory",
    )
    if min_nodes == 1:
        script.event(none)
    assert script.state.impossible is not None
    asked = script.count(ComputePlan)
    script.event(StopRequested(now=script.now))
    assert script.state.ended is None
    assert script.count(ComputePlan) == asked + 1
    script.event(none)
    assert script.last(JobEnded).reason == "as requested, but steps 1 to 7 are not saved: too little memory"


def test_stop_gives_up_growth_that_is_only_planned() -> None:
    script = Script()
    script.run(2, resources={"max_nodes": 3})
    third = f"{list(script.state.vms)[2]}.0"
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.answer(1, 3)
    script.event(StopRequested(now=script.now))
    assert script.state.planned is None
    assert script.state.running
    assert script.last(GenerationClosed).number == 2


def test_a_late_answer_is_taken_for_the_workers_that_it_was_about() -> None:
    """Found: one who had joined since counted as considered, and waited for ever."""
    script = Script()
    script.submit(resources={"max_nodes": 4})
    script.wait()
    a, b, c, d = [f"{vm}.0" for vm in script.state.vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in (a, b, c)))
    script.report(script.change(a, profile=Profile(recipe=RECIPE, calibration=uniform(2).to_json())))
    script.report(*(script.change(w, graph_hash="5ec7") for w in (a, b, c)))
    script.wait(5.0)
    first = script.last(ComputePlan)
    script.report(WorkerReport(worker=d, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.event(VmTerminated(now=script.now, vm=c[:-2]))
    del script.workers[c]
    script.wait(1.0)
    assert script.last(ComputePlan).asked == {a, b, d}
    late = PlanComputed(now=script.now, generation=1, asked=first.asked, plan=None, reason="too few")
    script.event(late)
    assert script.state.impossible is None  # the question that is pending is answered yet
    plan = {**plan_json(2, 1), "generation": 1}
    script.event(late.model_copy(update={"plan": plan, "workers": (a, b)}))
    script.prepare()
    script.open()
    script.form()
    script.wait(5.0)
    assert script.last(ComputePlan).asked == {a, b, d}
    assert script.last(ComputePlan).generation == 2
