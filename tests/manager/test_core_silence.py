"""Silence is no death: what the core makes of VMs that it does not hear, and of its own isolation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Timing
from makara.manager.core.commands import ComputePlan, ReleaseVm
from makara.manager.core.events import ConnectionClosed, ManagerStarted, PlanComputed, VmTerminated
from makara.manager.core.facts import (
    EndReason,
    GenerationClosed,
    GenerationPlanned,
    IsolationChanged,
    VmEnded,
)
from makara.manager.core.orders import Leases, orders
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.pipeline import Range, grid
from makara.protocol.messages import Phase, Profile, WorkerReport

TOLD = (
    "isolated: most VMs fell silent at about the same time, {} of {} for more than their lease; "
    "nothing is changed for it"
)


def pass_time(script: Script, seconds: int, *, silent: list[str], step: bool = False) -> None:
    """Ticks and heartbeats, a second apart, without those of the VMs of the workers `silent`."""
    vms = tuple(vm_of(worker) for worker in silent)
    for _ in range(seconds):
        script.wait(1.0)
        heard = [w for name, w in script.workers.items() if vm_of(name) not in vms]
        steps = [
            w.model_copy(update={"step": w.step + 1}) for w in heard if step and w.phase is Phase.RUNNING
        ]
        script.report(*steps, silent=vms)


def vm_of(worker: str) -> str:
    return worker.rpartition(".")[0]


def test_a_manager_without_network_for_16_seconds_harms_nobody() -> None:
    script = Script()
    workers = script.run(4)
    before = len(script.facts)
    pass_time(script, 16, silent=workers)
    pass_time(script, 1, silent=workers[1:])  # the first is heard: leases begin anew
    pass_time(script, 10, silent=workers[1:])
    pass_time(script, 30, silent=[])
    began, ended = script.facts[before:]
    assert isinstance(began, IsolationChanged)
    assert isinstance(ended, IsolationChanged)
    assert (began.isolated, ended.isolated) == (True, False)
    assert script.state.running
    assert script.count(ComputePlan) == 1


def test_a_manager_that_began_anew_while_it_was_isolated_does_not_say_that_it_was_heard() -> None:
    script = Script()
    workers = script.run(4)
    pass_time(script, 20, silent=workers)
    script.event(ManagerStarted(now=script.now))
    pass_time(script, 60, silent=workers)
    assert script.count(IsolationChanged) == 1
    pass_time(script, 2, silent=[])
    assert [f.isolated for f in script.facts if isinstance(f, IsolationChanged)] == [True, False]


def test_isolation_is_told_truly_while_leases_end_one_after_the_other() -> None:
    """Found: "1 of 3 VMs fell silent at once"."""
    script, job = Script(), Job("j", [], [])
    workers = script.run(3)
    pass_time(script, 5, silent=workers[:1])
    pass_time(script, 11, silent=workers)
    job.state, job.observations = script.state, script.observations
    assert script.observations.unheard == {vm_of(workers[0])}
    assert job_view(job, {}, 0.0).isolated == TOLD.format(1, 3)


def test_a_manager_that_hears_nobody_says_so() -> None:
    script, job = Script(), Job("j", [], [])
    workers = script.run(4)
    pass_time(script, 14, silent=workers)
    job.state, job.observations = script.state, script.observations
    assert job_view(job, {}, 0.0).isolated is None
    pass_time(script, 3, silent=workers)
    job.state, job.observations = script.state, script.observations
    assert job_view(job, {}, 0.0).isolated == TOLD.format(4, 4)
    assert {vm.detail for vm in job_view(job, {}, 0.0).vms} == {"silent"}
    script.report()
    job.observations = script.observations
    assert job_view(job, {}, 0.0).isolated is None


def test_an_isolated_manager_opens_no_generation_that_is_prepared() -> None:
    script = Script()
    workers = script.start(4)
    pass_time(script, 1, silent=[])
    for worker in workers[1:]:
        script.workers[worker] = script.change(worker, prepared=1)
    script.report()
    pass_time(script, 200, silent=workers)
    script.report(
        script.change(workers[0], prepared=1, endpoint="10.0.0.1:1"), silent=tuple(map(vm_of, workers[1:]))
    )
    assert script.count(GenerationClosed) == 0
    script.report()
    assert script.state.planned is not None
    assert script.state.planned.prepared_at is not None  # once it is heard it goes on where it was


@pytest.mark.parametrize("lease_s", [1.0, 3.0])
def test_a_silent_vm_is_noticed_however_short_its_lease_is(lease_s: float) -> None:
    """Found: a manager with a lease of 0.5 s took itself for suspended at each tick, and noticed nothing."""
    script = Script(timing=Timing(vm_lease_s=lease_s))
    workers = script.run(3)
    pass_time(script, 6, silent=workers[2:])
    assert script.observations.unheard == {vm_of(workers[2])}


def test_a_manager_that_was_suspended_takes_nobody_for_silent() -> None:
    script = Script()
    workers = script.run(3)
    pass_time(script, 10, silent=workers)
    script.wait(20.0)
    pass_time(script, 14, silent=workers)
    assert script.observations.unheard == frozenset()


def test_a_silent_vm_is_planned_around_and_used_again_when_it_is_heard() -> None:
    script = Script()
    workers = script.run(4)
    silent = workers[3]
    pass_time(script, 14, silent=[silent])
    assert script.state.running
    pass_time(script, 3, silent=[silent])
    assert script.last(GenerationClosed).reason == f"{silent} silent for 15 s"
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    assert script.count(VmEnded) == 0
    assert orders(script.state, vm_of(silent)).action == "idle"
    script.answer(2, 1)
    assert silent not in [worker for worker, _ in script.last(GenerationPlanned).members]
    asleep = script.workers.pop(silent)
    script.prepare()
    script.open()
    script.form(step=3)
    script.workers[silent] = asleep.model_copy(update={"phase": Phase.IDLE})
    pass_time(script, 1, silent=[])
    assert silent in [slot.worker for slot in script.last(ComputePlan).workers]
    assert script.count(VmEnded) == 0


def test_a_silent_vm_is_ended_when_its_agent_has_ended_itself() -> None:
    leases = Leases(orphan_timeout_s=100.0, orphan_save_s=20.0)
    script = Script(timing=replace(Timing(), leases=leases))
    _, second = script.run(2)
    pass_time(script, 134, silent=[second])
    assert script.count(VmEnded) == 0
    pass_time(script, 2, silent=[second])
    ended = [fact for fact in script.facts if isinstance(fact, VmEnded)]
    assert [(fact.vm, fact.reason) for fact in ended] == [(vm_of(second), EndReason.LEASE_EXPIRED)]
    assert script.last(ReleaseVm).vm == vm_of(second)
    # Its zombie is told to shut down, and what it says changes nothing.
    assert orders(script.state, vm_of(second)).action == "shutdown"
    assert script.report(script.change(second, step=9)) == []


def test_isolation_ends_where_agents_must_have_ended_themselves() -> None:
    leases = Leases(orphan_timeout_s=100.0, orphan_save_s=20.0)
    script = Script(timing=replace(Timing(), leases=leases))
    workers = script.run(2)
    pass_time(script, 134, silent=workers)
    assert script.count(VmEnded) == 0
    pass_time(script, 2, silent=workers)
    assert [fact.reason for fact in script.facts if isinstance(fact, VmEnded)] == [
        EndReason.LEASE_EXPIRED
    ] * 2


def test_what_the_provider_says_holds_in_isolation_too() -> None:
    script = Script()
    workers = script.run(4)
    pass_time(script, 20, silent=workers[1:])
    assert script.state.running
    for worker in workers[1:]:
        script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
    pass_time(script, 1, silent=workers[1:])
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:1]


def test_a_generation_that_steps_is_kept_though_a_member_is_unheard() -> None:
    script = Script()
    workers = script.run(4)
    before = len(script.facts)
    pass_time(script, 60, silent=workers[3:], step=True)
    assert script.facts[before:] == []
    # Neither is it changed for a newcomer: the member that is unheard could not be told to switch.
    script.report(WorkerReport(worker=workers[3], incarnation=1, phase=Phase.RUNNING, generation=1, step=60))
    pass_time(script, 1, silent=[])
    assert script.state.running
    pass_time(script, 16, silent=workers[3:])  # it steps no more
    assert script.last(GenerationClosed).reason == f"{workers[3]} silent for 15 s"


def test_nothing_new_is_planned_for_newcomers_while_a_member_is_unheard() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    pass_time(script, 20, silent=workers[1:], step=True)
    third = f"{list(script.state.vms)[2]}.0"
    script.workers[third] = WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7")
    pass_time(script, 20, silent=workers[1:], step=True)
    assert script.count(ComputePlan) == 1
    script.workers[workers[1]] = script.workers[workers[0]].model_copy(update={"worker": workers[1]})
    pass_time(script, 2, silent=[], step=True)
    assert script.count(ComputePlan) == 2


def test_a_long_step_is_given_time_to_be_committed() -> None:
    script = Script()
    workers = script.start(2, resources={"max_nodes": 3})
    script.prepare()
    script.open()
    script.form()
    current = script.state.current
    assert current is not None
    script.facts[:] = [
        fact.model_copy(update={"predicted_s": 60.0}) if isinstance(fact, GenerationPlanned) else fact
        for fact in script.facts
    ]
    script.state = script.state.changed(current=replace(current, predicted_s=60.0))
    pass_time(script, 74, silent=workers[1:])
    assert script.state.running
    pass_time(script, 3, silent=workers[1:])
    assert not script.state.running


def test_a_switch_waits_for_an_unheard_member_no_longer_than_forming_may_take() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3})
    third = f"{list(script.state.vms)[2]}.0"
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.report()
    script.answer(1, 2)
    script.prepare()
    pass_time(script, 20, silent=workers[1:], step=True)
    script.open()
    pass_time(script, 170, silent=workers[1:], step=True)
    assert script.state.current is not None
    pass_time(script, 20, silent=workers[1:], step=True)
    assert script.last(GenerationClosed).reason.startswith("did not form: no progress for 18")
    assert script.state.abandoned == 2  # which makes all of them leave the old one


def test_a_planned_generation_does_without_a_member_that_falls_silent() -> None:
    script = Script()
    workers = script.start(4)
    pass_time(script, 17, silent=workers[3:])
    assert "silent while it was prepared" in script.last(GenerationClosed).reason
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]


def test_most_that_fall_silent_one_after_the_other_are_no_isolation() -> None:
    script = Script()
    workers = script.run(4)
    pass_time(script, 20, silent=workers[3:])
    assert script.count(GenerationClosed) == 1
    script.answer(2, 1)
    del script.workers[workers[3]]
    script.prepare()
    script.open()
    script.form()
    pass_time(script, 20, silent=workers[2:])
    assert script.count(GenerationClosed) == 2 or workers[2] not in [
        w for w, _ in script.state.current.incarnations
    ]
    assert script.observations.isolated_since is None


def test_half_of_the_vms_are_not_most() -> None:
    script = Script()
    workers = script.run(2)
    pass_time(script, 17, silent=workers[1:])
    assert script.count(GenerationClosed) == 1
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:1]


def test_those_who_are_heard_and_report_the_loss_are_believed() -> None:
    script = Script()
    workers = script.run(4)
    script.report(
        script.change(workers[0], phase=Phase.BROKEN, lost=[workers[1]]),
        silent=tuple(map(vm_of, workers[1:])),
    )
    pass_time(script, 20, silent=workers[1:])
    assert script.observations.isolated_since is None
    assert script.state.current is None
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:1]
    assert script.count(VmEnded) == 0


def test_connections_that_all_drop_for_a_moment_convict_nobody() -> None:
    script = Script()
    workers = script.run(4)
    for worker in workers:
        script.event(ConnectionClosed(now=script.now, vm=vm_of(worker)))
    silent = tuple(map(vm_of, workers[1:]))
    script.report(script.change(workers[0], phase=Phase.BROKEN, lost=workers[1:]), silent=silent)
    for _ in range(20):
        script.wait(0.25)
        script.report(silent=silent)
    assert script.count(VmEnded) == 0
    assert script.count(ComputePlan) == 1  # nor is one of four planned with: the others are about to return
    script.report(*(script.change(w, phase=Phase.BROKEN, lost=[workers[0]]) for w in workers[1:]))
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers
    assert script.count(VmEnded) == 0


@pytest.mark.parametrize("lost", [1, 3])
def test_only_a_precise_accusation_counts(lost: int) -> None:
    script = Script()
    workers = script.run(4)
    named = workers[4 - lost :]
    script.report(script.change(workers[0], phase=Phase.BROKEN, lost=named), silent=(vm_of(workers[3]),))
    script.event(ConnectionClosed(now=script.now, vm=vm_of(workers[3])))
    script.wait(1.4)
    assert script.observations.unheard == frozenset()
    script.wait(0.2)
    assert script.observations.unheard == ({vm_of(workers[3])} if lost == 1 else set())
    assert script.count(VmEnded) == 0


def test_a_vm_that_peers_lost_is_planned_around_after_the_grace_and_used_again_when_it_returns() -> None:
    script = Script()
    workers = script.run(4)
    lost, vm = workers[3], vm_of(workers[3])
    script.event(ConnectionClosed(now=script.now, vm=vm))
    script.report(*(script.change(w, phase=Phase.BROKEN, lost=[lost]) for w in workers[:3]), silent=(vm,))
    for _ in range(3):
        script.wait(0.6)
        script.report(silent=(vm,))
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    script.answer(1, 2)
    away = script.workers.pop(lost)
    script.prepare()
    script.open()
    script.form(step=3)  # nobody accuses it any more
    script.wait(1.0)
    assert script.observations.unheard == {vm}
    script.workers[lost] = away.model_copy(update={"phase": Phase.IDLE})  # agents retry every 5 s
    pass_time(script, 40, silent=[])
    assert lost in [slot.worker for slot in script.last(ComputePlan).workers]
    assert script.count(VmEnded) == 0


def test_a_vm_that_peers_lost_and_that_stays_away_is_ended_as_any_other_that_is_silent() -> None:
    script = Script()
    workers = script.run(4)
    script.event(ConnectionClosed(now=script.now, vm=vm_of(workers[3])))
    script.report(
        *(script.change(w, phase=Phase.BROKEN, lost=workers[3:]) for w in workers[:3]),
        silent=(vm_of(workers[3]),),
    )
    pass_time(script, 914, silent=workers[3:])
    assert script.count(VmEnded) == 0
    pass_time(script, 2, silent=workers[3:])
    assert script.last(VmEnded).vm == vm_of(workers[3])
    assert script.last(VmEnded).reason is EndReason.LEASE_EXPIRED


def test_a_loss_that_a_trainers_death_explains_does_not_accuse_its_vm() -> None:
    script = Script()
    workers = script.run(4)
    fresh = WorkerReport(worker=workers[3], incarnation=2, phase=Phase.STARTING)
    script.report(fresh, *(script.change(w, phase=Phase.BROKEN, lost=[workers[3]]) for w in workers[:3]))
    script.wait(3.0)
    script.event(ConnectionClosed(now=script.now, vm=vm_of(workers[3])))
    script.wait(3.0)
    assert script.count(VmEnded) == 0


@pytest.mark.parametrize(("num_vms", "num_dead"), [(3, 2), (4, 3)])
@pytest.mark.parametrize("named", ["nobody", "one", "all"])
def test_a_survivor_goes_on_after_a_lease_whomever_it_names(num_vms: int, num_dead: int, named: str) -> None:
    script = Script()
    script.submit(resources={"max_nodes": num_vms})
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))
    answer(script, workers)
    script.prepare()
    script.open()
    script.form()
    survivor, dead = workers[0], workers[1 : 1 + num_dead]
    for worker in dead:
        script.event(ConnectionClosed(now=script.now, vm=vm_of(worker)))
    lost = {"nobody": [], "one": dead[:1], "all": dead}[named]
    script.report(script.change(survivor, phase=Phase.BROKEN, lost=lost), silent=tuple(map(vm_of, dead)))
    pass_time(script, 17, silent=dead)
    assert not {slot.worker for slot in script.last(ComputePlan).workers} & set(dead)
    # It stays so when the survivor has left the generation of which it reported the loss.
    answer(script, [slot.worker for slot in script.last(ComputePlan).workers])
    for worker in dead:
        del script.workers[worker]
    script.prepare()
    script.open()
    script.form()
    pass_time(script, 30, silent=dead)
    assert script.observations.isolated_since is None
    assert script.state.running


def answer(script: Script, workers: list[str]) -> None:
    """A plan of one stage on each of the workers."""
    asked = script.last(ComputePlan)
    plan = {**grid([Range(0, 2)], len(workers), 4).to_json(), "generation": asked.generation}
    computed = PlanComputed(
        now=script.now, generation=asked.generation, asked=asked.asked, plan=plan, workers=tuple(workers)
    )
    script.event(computed)


def test_a_manager_that_is_cut_off_from_most_of_a_generation_that_runs_stays_isolated() -> None:
    script = Script()
    workers = script.run(4)
    for worker in workers[1:]:
        script.event(ConnectionClosed(now=script.now, vm=vm_of(worker)))
    pass_time(script, 30, silent=workers[1:])
    assert script.observations.isolated_since is not None
    assert script.state.running


def test_a_vm_that_takes_part_in_steps_is_not_ended_however_long_it_is_unheard() -> None:
    script = Script()
    workers = script.run(4)
    pass_time(script, 1000, silent=workers[3:], step=True)
    assert script.count(VmEnded) == 0
    assert script.state.running
    pass_time(script, 40, silent=workers[3:])  # it steps no more
    assert [fact.vm for fact in script.facts if isinstance(fact, VmEnded)] == [vm_of(workers[3])]
