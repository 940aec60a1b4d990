"""VMs on which trainers die again and again, or that cannot meet the recipe: replaced, and bounded."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Timing
from makara.manager.core.commands import ComputePlan, ReleaseVm, RequestVm
from makara.manager.core.events import ResumeRequested, VmTerminated
from makara.manager.core.facts import (
    BitsFixed,
    EndReason,
    JobEnded,
    PersonNeeded,
    Resumption,
    VmEnded,
    WorkerFailed,
)
from makara.manager.core.state import Status
from makara.manager.core.strikes.table import Kind
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.protocol.messages import CheckpointRef, Failure, Formed, Phase, Profile, WorkerReport


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


def test_deaths_that_nobody_could_be_told_of_count_when_the_agent_is_heard_again() -> None:
    """Two incarnations died while the manager was away, and the third reports."""
    script = Script()
    worker = script.run(2)[0]
    message = "ended by SIGKILL; it held 9.0 GB"
    dead = [
        script.change(
            worker,
            incarnation=n,
            phase=Phase.EXITED,
            formed=None,
            failure=Failure(kind="killed", message=message),
        )
        for n in (1, 2)
    ]
    script.extra[vm_of(worker)] = {"deaths": dead}
    facts = script.report(WorkerReport(worker=worker, incarnation=3, phase=Phase.IDLE))
    told = [fact for fact in facts if isinstance(fact, WorkerFailed)]
    assert [(fact.incarnation, fact.message) for fact in told] == [(1, message), (2, message)]
    assert script.state.strikes.count(Kind.VM_DEATH, vm_of(worker)) == 2
    assert not [fact for fact in script.report() if isinstance(fact, WorkerFailed)]  # told again, until heard


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
    for _ in range(5):
        for _ in range(2):
            die(script, worker)
        script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
        assert {kind for kind, _ in script.state.strikes.strikes} == {Kind.LOST_VM}
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
    assert not script.state.strikes.strikes


def test_a_notice_that_comes_with_a_death_explains_it() -> None:
    script = Script()
    workers = script.run(2)
    script.extra[vm_of(workers[1])] = {"notice_deadline_s": 900.0}
    die(script, workers[1])
    assert script.count(WorkerFailed) == 1
    assert not script.state.strikes.strikes


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


def profiled(script: Script, num_vms: int, **changes: dict[str, Any]) -> list[str]:
    """Workers that came up, of which the first has traced the model."""
    script.submit(**{"resources": {"max_nodes": num_vms}, **changes})
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    return workers


def lose(script: Script, worker: str) -> None:
    """The provider takes the worker's VM."""
    script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
    del script.workers[worker]


def until_a_person_is_needed(script: Script) -> PersonNeeded:
    """Every VM that comes from now on is unfit."""
    for _ in range(5):
        assert script.state.waiting is None
        worker = replacement(script)
        join_unfit(script, worker)
        del script.workers[worker]
    assert script.state.status is Status.WAITING
    assert script.state.ended is None
    return script.last(PersonNeeded)


def test_a_job_for_which_none_is_fit_waits_for_a_person_and_says_what_differs() -> None:
    script = Script()
    lose(script, script.run(1)[0])
    needed = until_a_person_is_needed(script)
    assert "VMs that cannot meet the recipe came 5 times in a row" in needed.reason
    assert "its graph hash is 0ther" in needed.reason
    assert needed.offers == (Resumption.AGAIN, Resumption.RESTART)
    requests = script.count(RequestVm)
    script.wait(4000.0)
    assert script.count(RequestVm) == requests


def test_hashes_that_differ_are_told_as_far_as_a_person_reads_them() -> None:
    """Found: two hashes of 64 digits in each message."""
    script = Script()
    workers = script.start(2)
    script.report(script.change(workers[1], graph_hash="ab" * 32))
    assert script.last(WorkerFailed).message == f"its graph hash is {'ab' * 6}, the job's is 5ec7"


def test_a_person_has_a_job_try_other_vms_once_more() -> None:
    script = Script()
    lose(script, script.run(1)[0])
    until_a_person_is_needed(script)
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    worker = replacement(script)
    join_unfit(script, worker)
    assert script.state.waiting is None, "the count begins anew"
    del script.workers[worker]
    worker = replacement(script)
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == [worker]


def test_the_end_of_the_only_vm_that_is_fit_is_no_reason_to_give_up() -> None:
    script = Script()
    first = script.run(1, resources={"max_nodes": 2})[0]
    worker = f"{list(script.state.vms)[1]}.0"
    for _ in range(6):
        join_unfit(script, worker)
        del script.workers[worker]
        script.now += 8000.0
        worker = replacement(script)
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.STARTING))
    lose(script, first)
    script.wait(0.25)
    assert script.state.ended is None
    assert script.state.waiting is None
    join_unfit(script, worker)  # nor is what came while one was fit counted against those that come now
    del script.workers[worker]
    script.wait(0.25)
    assert script.state.waiting is None
    assert script.state.strikes.count(Kind.UNFIT_VM) == 1


def test_vms_that_are_unfit_together_count_once() -> None:
    script = Script()
    workers = profiled(script, 4)
    lose(script, workers[0])
    script.report(*(script.change(w, graph_hash="0ther") for w in workers[1:]))
    script.wait(0.25)
    assert len(ended(script, EndReason.UNFIT)) == 3
    assert script.state.ended is None
    assert script.state.waiting is None
    assert script.state.strikes.count(Kind.UNFIT_VM) == 1


def test_a_vm_that_is_on_its_way_may_be_fit() -> None:
    script = Script()
    script.timing = script.timing.with_row(Kind.UNFIT_VM, limit=1)
    lose(script, script.run(1, resources={"max_nodes": 2})[0])
    script.wait(0.25)
    script.wait(10.0)
    first, second = (f"{vm.vm}.0" for vm in script.state.live_vms)
    join_unfit(script, first)
    assert ended(script, EndReason.UNFIT) == [vm_of(first)]
    assert script.state.waiting is None, "another was asked for"
    del script.workers[first]
    script.report(WorkerReport(worker=second, incarnation=1, phase=Phase.STARTING))
    assert script.state.waiting is None, "it has not traced the model yet"
    join_unfit(script, second)
    assert script.state.waiting is not None


def test_vms_of_other_bits_have_the_job_wait_and_a_new_beginning_chooses_bits_anew() -> None:
    script = Script()
    script.timing = script.timing.with_row(Kind.UNFIT_VM, limit=1)
    (first,) = profiled(script, 1, training={"numerics": "exact"})
    script.report(script.change(first, graph_hash="5ec7", bits_hash="aa"))
    assert script.last(BitsFixed).bits_hash == "aa"
    lose(script, first)
    worker = replacement(script)
    other = WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7", bits_hash="bb")
    script.report(other)
    assert "other bits (bb) than the job's (aa)" in script.last(PersonNeeded).reason
    del script.workers[worker]
    script.event(ResumeRequested(now=script.now, how=Resumption.RESTART))
    worker = replacement(script)
    script.report(other.model_copy(update={"worker": worker}))
    script.wait(5.0)
    assert script.last(BitsFixed).bits_hash == "bb"
    assert script.state.waiting is None


def test_one_that_is_fit_in_between_begins_the_count_anew() -> None:
    script = Script()
    first = script.run(1, resources={"max_nodes": 2})[0]
    worker = f"{list(script.state.vms)[1]}.0"
    for _ in range(3):
        join_unfit(script, worker)
        del script.workers[worker]
        worker = replacement(script)
    assert script.state.strikes.count(Kind.UNFIT_VM) == 3
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.report()
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    assert {seat[0] for seat in script.state.hosts} == {first, worker}
    assert script.state.strikes.count(Kind.UNFIT_VM) == 0


def test_a_type_of_vm_that_is_never_fit_costs_one_vm_at_a_time_after_the_first_round() -> None:
    script = Script()
    first = profiled(script, 4)
    script.report(*(script.change(w, graph_hash="0ther") for w in first))
    assert len(ended(script, EndReason.UNFIT)) == 4
    script.workers.clear()
    waits: list[float] = []
    while script.state.waiting is None:
        ended_at = script.state.strikes.of(Kind.UNFIT_VM).since
        while not script.state.live_vms:
            script.wait(1.0)
        waits.append(script.now - ended_at)
        (vm,) = script.state.live_vms
        script.wait(60.0)
        assert len(script.state.live_vms) == 1, "the next is asked for when this one has shown what it is"
        join_unfit(script, f"{vm.vm}.0")
        script.workers.clear()
    assert script.count(RequestVm) == 4 + 4
    assert waits == [5.0, 10.0, 20.0, 40.0]


def test_once_one_is_fit_all_that_are_missing_are_asked_for_again() -> None:
    script = Script()
    first = profiled(script, 6, resources={"max_nodes": 6, "min_nodes": 4})
    script.report(*(script.change(w, graph_hash="0ther") for w in first))
    script.workers.clear()
    worker = replacement(script)
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.STARTING))
    script.wait(60.0)
    assert len(script.state.live_vms) == 1
    script.report(script.change(worker, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(1.0)
    script.wait(1.0)
    assert len(script.state.live_vms) == 6


def test_a_round_with_a_vm_that_is_fit_is_followed_by_all_that_are_missing() -> None:
    script = Script()
    first = profiled(script, 4)
    fit, unfit = first[:1], first[1:]
    script.report(
        *(script.change(w, graph_hash="5ec7") for w in fit),
        *(script.change(w, graph_hash="0ther") for w in unfit),
    )
    for worker in unfit:
        del script.workers[worker]
    script.wait(10.0)
    script.wait(1.0)
    assert len(script.state.live_vms) == 4


def test_a_job_says_that_vms_are_asked_for_one_at_a_time_and_why() -> None:
    script, job = Script(), Job("j", [], [])
    first = profiled(script, 3)
    script.report(*(script.change(w, graph_hash="0ther") for w in first))
    script.workers.clear()
    script.wait(1.0)
    job.state, job.observations = script.state, script.observations
    (trouble,) = job_view(job, {}, 0.0).trouble
    assert trouble.startswith("request_vm: the newest VMs cannot meet the recipe (its graph hash is 0ther")
    assert trouble.endswith("one at a time is asked for, 5 s after the last")
    worker = replacement(script)
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(1.0)
    job.state, job.observations = script.state, script.observations
    assert job_view(job, {}, 0.0).trouble == []


def two_workers_on_one_vm(script: Script) -> tuple[str, str]:
    """A VM of two devices, of which the second cannot meet the recipe."""
    script.submit(resources={"max_nodes": 1, "workers_per_node": 2})
    script.wait()
    (vm,) = script.state.vms
    good, bad = f"{vm}.0", f"{vm}.1"
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in (good, bad)))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(good, profile=profile, graph_hash="5ec7"))
    script.report(script.change(bad, graph_hash="0ther"))
    return good, bad


def test_a_vm_is_kept_as_long_as_one_of_its_workers_is_fit_and_the_others_are_shown() -> None:
    script, job = Script(), Job("j", [], [])
    good, bad = two_workers_on_one_vm(script)
    assert script.count(VmEnded) == 0
    script.wait(5.0)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == [good]
    script.answer(1, 1)
    script.prepare()
    script.open()
    script.form()
    script.wait(20.0)
    assert script.state.running
    assert script.count(VmEnded) == 0
    job.state, job.observations = script.state, script.observations
    job.reports = {vm: last_report.report for vm, last_report in script.observations.last_reports.items()}
    (vm,) = job_view(job, {}, 0.0).vms
    assert vm.workers == [f"{good}: running", f"{bad}: unfit"]
    assert vm.detail == f"{bad} is not used: its graph hash is 0ther, the job's is 5ec7"


def test_a_vm_none_of_whose_workers_is_fit_is_replaced() -> None:
    script = Script()
    good, _ = two_workers_on_one_vm(script)
    script.report(script.change(good, incarnation=2, profile=None, graph_hash="0ther"))
    assert ended(script, EndReason.UNFIT) == [vm_of(good)]


def test_a_vm_that_does_not_show_in_time_whether_it_is_fit_is_not_waited_for() -> None:
    """Found: a VM in a phase of another version kept all others from being asked for."""
    script = Script(timing=Timing(start_wait_s=60.0))
    script.run(1, resources={"max_nodes": 3})
    for first in (1, 3):  # the second pair is newer than the one that is fit
        if first == 3:
            replacement(script)
        for vm in list(script.state.vms)[first : first + 2]:
            join_unfit(script, f"{vm}.0")
            del script.workers[f"{vm}.0"]
    requested = script.count(RequestVm)
    worker = replacement(script)
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.OTHER))
    for _ in range(10):
        script.wait(5.0)
        script.report()
    assert script.count(RequestVm) == requested + 1
    for _ in range(4):
        script.wait(5.0)
        script.report()
    assert script.count(RequestVm) == requested + 2
