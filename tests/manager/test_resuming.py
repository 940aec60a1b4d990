"""A job that was stopped or failed goes on, as if it had never ended; in no other state can it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn, cast

import pytest
from core_script import RECIPE, Script
from makara.checkpoint import StoreRefused
from makara.manager.api.continuing import is_going_on
from makara.manager.cli.progress import ways_on
from makara.manager.core.commands import (
    Command,
    ComputePlan,
    CopyCheckpoint,
    ExportWeights,
    OpenHead,
    RequestVm,
)
from makara.manager.core.events import (
    CommandStuck,
    ContinueRequested,
    Event,
    JobCommandFailed,
    ManagerStarted,
    StopRequested,
    WeightsExported,
)
from makara.manager.core.facts import GenerationPlanned, GenerationStalled, JobContinued, JobEnded, Resumption
from makara.manager.core.fold import apply, fold
from makara.manager.core.orders import orders
from makara.manager.core.state import Status
from makara.manager.core.strikes.ledger import Ledger
from makara.manager.core.strikes.table import Kind
from makara.manager.service.effects import Effects
from makara.manager.service.runtime import Job
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.service.views.job import JobView, job_view
from makara.manager.spec.start_source import StartSource
from makara.manager.threads import Threads
from makara.protocol.messages import CheckpointRef, Failure, Phase, WorkerReport


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def go_on(script: Script, max_nodes: int = 2) -> None:
    script.workers.clear()
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=max_nodes))


def stopped() -> tuple[Script, list[str]]:
    """A job that was stopped after it published step 30."""
    script = Script()
    workers = script.run(2)
    script.report(script.change(workers[0], step=30, published=ref(30)))
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, step=30, phase=Phase.HELD) for w in workers))
    assert script.state.status is Status.STOPPED
    return script, workers


def idle_again(script: Script) -> list[str]:
    """The VMs that were asked for anew join, with trainers that are ready."""
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    idle = {"incarnation": 1, "phase": Phase.IDLE, "graph_hash": "5ec7"}
    script.report(*(WorkerReport(worker=w, **idle) for w in workers))
    return workers


def test_a_stopped_job_goes_on_from_its_newest_checkpoint_with_other_vms() -> None:
    script, before = stopped()
    requested = script.count(RequestVm)
    go_on(script, max_nodes=3)
    assert script.state.status is Status.PENDING
    workers = idle_again(script)
    assert script.count(RequestVm) == requested + 3
    assert not set(workers) & set(before)
    assert script.state.status is Status.STARTING
    script.answer(2, 1)
    assert script.last(GenerationPlanned).number == 2
    assert script.last(GenerationPlanned).cause == "resumed"
    script.prepare()
    command = script.last(OpenHead)
    assert (command.generation, command.opened, command.checkpoints) == (2, 1, (ref(30),))
    assert not command.restart
    script.open(ref(30))
    script.form(30)
    assert script.state.status is Status.RUNNING
    assert script.state.current is not None
    assert script.state.current.lost_steps == 0


def test_vms_that_no_plan_could_use_are_not_asked_for() -> None:
    """Found: `--max-nodes 20` rented twelve VMs that stood beside a job of 2 sections and 4 micro-batches."""
    script, _ = stopped()
    requested = script.count(RequestVm)
    go_on(script, max_nodes=20)
    for _ in range(8):
        script.wait(1.0)
    assert script.count(RequestVm) == requested + 8
    [note] = shown(script).notes
    assert note.startswith("max_nodes is 20, but no plan gives more than 8 VMs work (2 sections and 4 micro-")


def test_a_vm_without_work_is_told_why() -> None:
    script = Script()
    workers = script.start(3)
    assert script.state.planned is not None
    assert script.state.planned.num_workers == 2
    script.prepare()
    script.open()
    script.form()
    [note, alone] = shown(script).notes
    assert (
        alone == "silent corruption is found by comparing hosts of a section, and each section has one host"
    )
    vm = workers[2].rpartition(".")[0]
    assert (
        note == f"{vm}: without work in the plan 2x1, and kept as a reserve: none with more of them is "
        "faster or fits"
    )


def shown(script: Script) -> JobView:
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    return job_view(job, {}, 0.0)


def test_a_resumed_job_waits_for_its_vms_to_gather_as_a_new_one_does() -> None:
    script, _ = stopped()
    go_on(script)
    script.wait(1.0)
    asked = script.count(ComputePlan)
    first = f"{script.state.live_vms[0].vm}.0"
    script.report(WorkerReport(worker=first, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    assert script.count(ComputePlan) == asked
    script.wait(script.timing.settle_s + 1.0)
    assert script.count(ComputePlan) == asked + 1


def test_vms_of_the_time_before_are_told_to_shut_down_and_what_they_say_counts_for_nothing() -> None:
    script, before = stopped()
    reports = dict(script.workers)
    go_on(script)
    assert all(orders(script.state, worker[:-2]).action == "shutdown" for worker in before)
    idle_again(script)
    script.answer(2, 1)
    script.prepare()
    script.open(ref(30))
    script.form(30)
    state = script.state
    script.workers.update(reports)
    late = script.change(before[0], step=40, published=ref(40))
    script.workers = {name: worker for name, worker in script.workers.items() if name in before}
    assert script.report(late) == []
    assert script.state == state


def test_what_a_zombie_published_before_the_new_generation_opened_is_gone_on_from() -> None:
    script, _ = stopped()
    go_on(script)
    idle_again(script)
    script.answer(2, 1)
    script.prepare()
    script.open(ref(35), ref(30))
    assert script.state.published == (ref(30), ref(35))
    assert script.state.base == ref(35)


def test_a_failed_job_begins_anew_with_all_counts_of_failures() -> None:
    script = Script()
    workers = script.run(2)
    script.report(script.change(workers[0], step=20, published=ref(20)))
    failure = Failure(kind="user", message="ValueError: boom", traceback="Traceback ...")
    for incarnation in (1, 2):
        script.now += 60.0
        exited = WorkerReport(
            worker=workers[0], incarnation=incarnation, phase=Phase.EXITED, failure=failure, step=25
        )
        script.report(exited)
    assert script.state.status is Status.FAILED
    assert script.state.strikes.count(Kind.USER_ERROR) == 2
    assert ways_on(shown(script).model_dump()) == [
        "makara apply -f job.yaml  with mended code or settings: a new job, from step 20 with "
        "checkpoint.start_from: j",
        "makara resume j  goes on from step 20 of 100 with up to 2 VMs, with the code and settings as they "
        "were",
    ]
    go_on(script)
    state = script.state
    assert state.strikes == Ledger()
    assert (state.last_error, state.last_traceback) == ("", None)
    assert state.progress_step == 20, "what was not saved is done again"
    workers = idle_again(script)
    script.answer(2, 1)
    script.report(script.change(workers[0], phase=Phase.EXITED, failure=failure))
    assert script.state.ended is None, "one error is allowed, as at first"


def test_a_job_that_failed_before_its_first_plan_is_measured_anew() -> None:
    script = Script()
    script.submit()
    script.event(JobCommandFailed(now=script.now, command="request_vm", error="a fault of ours"))
    assert script.state.status is Status.FAILED
    go_on(script)
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    assert script.state.status is Status.PROFILING


def test_a_trained_job_whose_weights_were_not_exported_exports_them() -> None:
    script = Script()
    first, _ = script.run(2)
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    script.event(CommandStuck(now=script.now, command="export_weights", error="AccessDenied"))
    script.event(StopRequested(now=script.now))
    assert script.state.status is Status.STOPPED
    exports, requested = script.count(ExportWeights), script.count(RequestVm)
    go_on(script)
    script.wait(1.0)
    assert script.state.status is Status.EXPORTING
    assert (script.count(ExportWeights), script.count(RequestVm)) == (exports + 1, requested)
    script.event(WeightsExported(now=script.now, uri="u", sha256="5a", step=100))
    assert script.state.status is Status.FINISHED


def test_a_job_that_is_not_over_or_has_nothing_left_is_not_resumed() -> None:
    script = Script()
    script.run(2)
    go_on(script)
    assert script.count(JobContinued) == 0
    script, _ = stopped()
    script.facts.append(JobEnded(at=script.now, status="finished"))
    script.state = script.state.changed(
        ended=JobEnded(at=script.now, status="finished"), num_facts=script.state.num_facts + 1
    )
    go_on(script)
    assert script.count(JobContinued) == 0


def test_what_fails_late_of_the_time_before_is_no_news_to_the_job(tmp_path: Path) -> None:
    """Found: a plan of before that failed for good ended the job that had gone on. (A release never does.)"""
    script, _ = stopped()
    before = script.last(ComputePlan)
    go_on(script)
    idle_again(script)
    after = script.last(ComputePlan)
    assert after.generation == before.generation + 1
    late = before.model_copy(update={"generation": after.generation})  # asked anew, just before the stop
    assert not failures(script, tmp_path, late)
    assert failures(script, tmp_path, after) == ["compute_plan"]
    script.answer(2, 1)
    script.prepare()
    now = script.last(OpenHead)
    assert not failures(script, tmp_path, now.model_copy(update={"generation": 1}))
    assert failures(script, tmp_path, now) == ["open_head"]


def test_an_export_of_the_time_before_that_gives_up_late_asks_nobody(tmp_path: Path) -> None:
    script = Script()
    first, _ = script.run(2)
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=ref(100)))
    script.event(CommandStuck(now=script.now, command="export_weights", error="AccessDenied"))
    before = script.last(ExportWeights)
    script.event(StopRequested(now=script.now))
    go_on(script)
    after = script.last(ExportWeights)
    assert not failures(script, tmp_path, before, error=StoreRefused("AccessDenied"))
    assert failures(script, tmp_path, after, error=StoreRefused("AccessDenied")) == ["export_weights"]


def test_a_resume_while_the_job_stops_is_not_taken_for_the_one_before() -> None:
    """Found: it was answered as done, and the job ended."""
    script = Script()
    script.run(2)
    script.event(StopRequested(now=script.now))
    assert script.state.status is Status.STOPPING
    job, nobody = Job("j", [], []), cast(Service, None)  # whom it need not ask
    job.state = script.state.changed(answered=Resumption.AGAIN)
    assert not asyncio.run(is_going_on(nobody, job, Resumption.AGAIN, {}, {}))


def test_a_copy_that_fails_after_the_job_has_its_checkpoint_says_nothing(tmp_path: Path) -> None:
    script = Script()
    script.run(2)
    source = StartSource(uri=(tmp_path / "empty").as_uri(), job="other", recipe=RECIPE)
    late, gone = CopyCheckpoint(key="c", source=source), StoreRefused("there is none")
    assert not failures(script, tmp_path, late, error=gone)
    script.state = script.state.changed(start=source)
    assert failures(script, tmp_path, late, error=gone) == ["copy_checkpoint"]


def failures(script: Script, folder: Path, *commands: Command, error: Exception | None = None) -> list[str]:
    """Of which commands the job is told that they failed, where all that they do raises `error`."""
    emitted: list[Event] = []
    unplannable = script.state.changed(calibration=None)

    async def carry_out() -> None:
        left, done = len(commands), asyncio.Event()

        async def emit(_: str, event: Event) -> None:
            emitted.append(event)

        async def mark_done(_: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        def broken(*_: object) -> NoReturn:
            raise error or RuntimeError("a fault of ours")

        effects = Effects(
            providers={}, tokens=TokenStore(folder / "tokens"), scratch=folder, manager_url=str,
            join_secret=b"s", vm_directory=Path, state_of=lambda _: unplannable,
            open_store=broken, open_source=broken, emit=emit, mark_done=mark_done,
            fatal=broken, threads=Threads(), slow_call_s=60.0,
            store_patience_s=0.0,
        )  # fmt: skip
        for command in commands:
            effects.start("j", command)
        await done.wait()
        await effects.close()

    asyncio.run(carry_out())
    assert all(isinstance(event, CommandStuck | JobCommandFailed) for event in emitted)
    return [event.command for event in emitted if isinstance(event, CommandStuck | JobCommandFailed)]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_can_end_and_go_on_again_and_again_and_managers_die_between(restarts: int) -> None:
    script, _ = stopped()
    for time in range(3):
        go_on(script)
        if restarts:
            script.event(ManagerStarted(now=script.now))
        workers = idle_again(script)
        script.answer(2, 1)
        script.prepare()
        step = 30 + 10 * time
        newest = script.state.published[-1]
        script.open(newest)
        script.form(step)
        published = ref(step + 10, script.state.last_generation)
        script.report(script.change(workers[0], step=step + 10, published=published))
        script.event(StopRequested(now=script.now))
        script.report(*(script.change(w, step=step + 10, phase=Phase.HELD) for w in workers))
        assert script.state.status is Status.STOPPED
        assert script.state.published[-1].step == step + 10


def test_a_stall_of_before_lengthens_no_bound() -> None:
    """Found: a job that was resumed after stalls noticed the next one after hours."""
    script, _ = stopped()
    script.facts[-1:-1] = [
        GenerationStalled(
            at=script.now, generation=n, number=n, step=30, silent_s=9.0, bound_s=6.0, standing={},
            suspects=(),
        )
        for n in range(6)
    ]  # fmt: skip
    script.state = fold(script.facts)
    go_on(script)
    idle_again(script)
    script.answer(2, 1)
    script.prepare()
    script.open(ref(30))
    script.report(*(script.change(w, phase=Phase.FORMING, generation=2) for w in script.workers))
    script.wait(1.0)
    found = script.observations.no_progress
    assert found is not None
    assert found.bound_s == script.timing.form_timeout_s


@pytest.mark.parametrize(
    ("head_generation", "restarting", "kept"), [(0, False, False), (1, False, True), (1, True, False)]
)
def test_bits_are_kept_where_a_step_may_have_been_made_with_them(
    head_generation: int, restarting: bool, kept: bool
) -> None:
    """Found: they went where no checkpoint was journalled, though the head may list one."""
    ended = stopped()[0].state
    assert ended.recipe is not None
    recipe = ended.recipe.model_copy(update={"bits_hash": "aa"})
    ended = ended.changed(recipe=recipe, published=(), head_generation=head_generation, restarting=restarting)
    continued = apply(ended, JobContinued(at=0.0, min_nodes=1, max_nodes=2))
    assert continued.recipe is not None
    assert continued.recipe.bits_hash == ("aa" if kept else None)
