"""VMs on which trainers die again and again, or that cannot meet the recipe: replaced, and bounded."""

from __future__ import annotations

from typing import Literal

import pytest
from core_script import Script
from makara.manager.commands import ComputePlan, ReleaseVm, RequestVm
from makara.manager.events import VmTerminated
from makara.manager.facts import EndReason, JobEnded, VmEnded, WorkerFailed
from makara.manager.fold import fold
from makara.worker.messages import CheckpointRef, Failure, Formed, Phase, WorkerReport


def vm_of(worker: str) -> str:
    return worker.rpartition(".")[0]


def die(script: Script, *workers: str, kind: Literal["killed", "lease"] = "killed", steps: int = 0) -> None:
    """The next incarnation of each of the workers dies, long after the last, having committed `steps`."""
    script.now += 20.0
    reports: list[WorkerReport] = []
    for worker in workers:
        before = script.workers.get(worker)
        step = max((w.step for w in script.workers.values()), default=0)
        formed = Formed(generation=1, step=step, rung="peers", phases_s={})
        reports.append(
            WorkerReport(
                worker=worker,
                incarnation=before.incarnation + 1 if before is not None else 1,
                phase=Phase.EXITED,
                generation=1,
                formed=formed,
                step=step + steps,
                failure=Failure(kind=kind, message="ended by SIGKILL; it held 9.0 GB"),
            )
        )
    script.report(*reports)


def ended(script: Script, reason: EndReason) -> list[str]:
    return [fact.vm for fact in script.facts if isinstance(fact, VmEnded) and fact.reason is reason]


def replacement(script: Script) -> str:
    """A worker on a VM that was asked for in place of one that ended."""
    before = set(script.state.vms)
    script.wait(400.0)
    script.report()
    return f"{next(vm for vm in script.state.vms if vm not in before)}.0"


@pytest.mark.parametrize("kind", ["killed", "lease"])
def test_a_vm_on_which_trainers_die_without_progress_is_replaced(kind: Literal["killed", "lease"]) -> None:
    script = Script()
    workers = script.run(2)
    for _ in range(2):
        die(script, workers[1], kind=kind)
    assert ended(script, EndReason.WORKERS_DIED) == []
    die(script, workers[1], kind=kind)
    assert ended(script, EndReason.WORKERS_DIED) == [vm_of(workers[1])]
    assert "3 deaths of its trainers" in script.last(VmEnded).detail
    assert "SIGKILL; it held 9.0 GB" in script.last(VmEnded).detail
    assert script.last(ReleaseVm).vm == vm_of(workers[1])
    assert script.state.ended is None
    assert script.count(RequestVm) == 2
    replacement(script)
    assert script.count(RequestVm) == 3


def test_deaths_on_several_vms_end_the_job_with_what_is_known() -> None:
    script = Script()
    worker = script.run(1)[0]
    for _ in range(2):
        for _ in range(3):
            die(script, worker)
        assert script.state.ended is None
        del script.workers[worker]
        worker = replacement(script)
    for _ in range(3):
        assert script.state.ended is None
        die(script, worker)
    assert script.last(JobEnded).status == "failed"
    assert "9 deaths of trainers on 3 VMs without a new step" in script.last(JobEnded).reason
    assert "ended by SIGKILL; it held 9.0 GB" in script.last(JobEnded).reason
    assert not script.state.live_vms


def test_an_endless_kill_ends() -> None:
    script = Script()
    workers = script.run(4)
    for number in range(300):
        if script.state.ended is not None:
            break
        live = [w for w in workers if script.state.vms[vm_of(w)].live]
        die(script, live[number % len(live)])
    assert script.last(JobEnded).status == "failed"
    assert script.count(WorkerFailed) == 9


def test_deaths_with_progress_in_between_are_free() -> None:
    script = Script()
    workers = script.run(2)
    for _ in range(30):
        die(script, workers[1], steps=1)
    assert ended(script, EndReason.WORKERS_DIED) == []
    assert script.state.ended is None


def test_progress_of_others_does_not_excuse_a_vm() -> None:
    script = Script()
    workers = script.run(2)
    for step in range(3):
        script.workers[workers[0]] = script.change(workers[0], step=10 * step)
        script.report()
        die(script, workers[1])
    assert ended(script, EndReason.WORKERS_DIED) == [vm_of(workers[1])]
    assert script.state.ended is None


def test_a_checkpoint_of_steps_that_it_took_part_in_excuses_a_vm() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    for step in range(1, 10):
        die(script, workers[1])
        script.workers[workers[1]] = WorkerReport(
            worker=workers[1], incarnation=2 * step + 1, phase=Phase.IDLE, graph_hash="5ec7"
        )
        script.report()
        script.answer(2, 1)
        script.prepare()
        script.open()
        script.form(step=10 * (step - 1))
        published = CheckpointRef(step=10 * step, generation=step + 1)
        script.report(script.change(workers[0], published=published, step=10 * step))
    assert ended(script, EndReason.WORKERS_DIED) == []


def test_trainers_that_die_together_are_one_death() -> None:
    script = Script()
    workers = script.run(4)
    for _ in range(2):
        die(script, *workers)
    assert script.state.ended is None
    assert ended(script, EndReason.WORKERS_DIED) == []


def test_deaths_that_the_provider_confirms_do_not_count() -> None:
    script = Script()
    worker = script.run(1)[0]
    for _ in range(10):
        for _ in range(2):
            die(script, worker)
        script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
        assert script.state.deaths == ()
        del script.workers[worker]
        worker = replacement(script)
        script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    assert script.state.ended is None
    assert ended(script, EndReason.WORKERS_DIED) == []


def test_deaths_that_were_announced_do_not_count() -> None:
    script = Script()
    workers = script.run(2)
    script.extra[vm_of(workers[1])] = {"notice_deadline_s": 900.0}
    script.report()
    for _ in range(5):
        die(script, workers[1])
    assert script.state.deaths == ()


def test_a_notice_that_comes_with_a_death_explains_it() -> None:
    script = Script()
    workers = script.run(2)
    script.extra[vm_of(workers[1])] = {"notice_deadline_s": 900.0}
    die(script, workers[1])
    assert script.count(WorkerFailed) == 1
    assert script.state.deaths == ()


def join_unfit(script: Script, worker: str) -> None:
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="0ther"))


def test_a_vm_that_cannot_meet_the_recipe_is_replaced() -> None:
    script = Script()
    workers = script.start(2)
    script.report(script.change(workers[1], graph_hash="0ther"))
    assert "0ther" in script.last(WorkerFailed).message
    assert ended(script, EndReason.UNFIT) == [vm_of(workers[1])]
    assert "its graph hash is 0ther, the job's is 5ec7" in script.last(VmEnded).detail
    assert [slot.worker for slot in script.last(ComputePlan).workers] == [workers[0]]
    del script.workers[workers[1]]
    replacement(script)
    assert len(script.state.live_vms) == 2


def test_a_job_that_runs_goes_on_without_the_vms_that_are_not_fit() -> None:
    script = Script()
    script.run(1, resources={"max_nodes": 2})
    worker = f"{list(script.state.vms)[1]}.0"
    num_requests: list[int] = []
    for _ in range(8):
        join_unfit(script, worker)
        del script.workers[worker]
        num_requests.append(script.count(RequestVm))
        script.wait(3.0)
        script.report()
        assert script.count(RequestVm) == num_requests[-1]  # the next is asked for only after a while
        worker = replacement(script)
    assert script.state.running
    assert script.state.ended is None
    assert len(ended(script, EndReason.UNFIT)) == 8


def test_a_job_for_which_none_is_fit_fails_and_says_what_differs() -> None:
    script = Script()
    first = script.run(1)[0]
    script.event(VmTerminated(now=script.now, vm=vm_of(first)))
    del script.workers[first]
    for _ in range(5):
        assert script.state.ended is None
        worker = replacement(script)
        join_unfit(script, worker)
        del script.workers[worker]
    assert script.last(JobEnded).status == "failed"
    assert "5 VMs in a row cannot meet the recipe" in script.last(JobEnded).reason
    assert "its graph hash is 0ther" in script.last(JobEnded).reason


def test_one_that_is_fit_in_between_begins_the_count_anew() -> None:
    script = Script()
    first = script.run(1, resources={"max_nodes": 2})[0]
    worker = f"{list(script.state.vms)[1]}.0"
    for _ in range(3):
        join_unfit(script, worker)
        del script.workers[worker]
        worker = replacement(script)
    assert script.state.unfit_vms == 3
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.report()
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    assert {seat[0] for seat in script.state.hosts} == {first, worker}
    assert script.state.unfit_vms == 0


def test_a_journal_without_these_counts_still_folds() -> None:
    script = Script()
    workers = script.run(2)
    die(script, workers[1])
    old = [
        WorkerFailed.model_validate(fact.model_dump(exclude={"own_steps"}))
        if isinstance(fact, WorkerFailed)
        else fact
        for fact in script.facts
    ]
    assert fold(old).deaths == script.state.deaths
