"""VMs that are lost again and again at one step after they joined: pauses grow, then a person is asked. Not
where their cloud says that it took them: then another place is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Observations, fold
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import (
    ConnectionClosed,
    ManagerStarted,
    ResumeRequested,
    VmEndingSeen,
    VmTerminated,
)
from makara.manager.core.facts import AttemptMade, EndReason, PersonNeeded, Resumption
from makara.manager.core.state import vm_of
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import Failure, Phase, Profile, Profiling, WorkerReport
from test_renting import offer, pass_time, rented, succeed

TAKEN = "Server.SpotInstanceTermination: Instance terminated because capacity is needed"
DEATH = Failure(kind="killed", message="SIGKILL")


def train_on(script: Script, worker: str, step: int = 0) -> None:
    """A generation forms on this worker alone, and commits `step` steps."""
    ready = WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash=RECIPE.graph_hash)
    script.report(ready)
    if script.state.planned is None:
        script.wait(5.0)
    script.answer(1, 1)
    script.prepare()
    script.open()
    script.form()
    script.report(script.change(worker, step=step))


def lose(script: Script, *vms: str, taken_back: str = "") -> None:
    """Their provider says that they are gone, and does not say why, unless told otherwise."""
    for vm in vms:
        script.event(VmTerminated(now=script.now, vm=vm, taken_back=taken_back))
        script.workers = {name: it for name, it in script.workers.items() if vm_of(name) != vm}


def pauses_until_a_person_is_asked(
    script: Script,
    worker: str,
    *,
    steps: tuple[int, ...] = (),
    live: Callable[[Script, str], None] | None = None,
    end: Callable[[Script, str], None] | None = None,
) -> list[float]:
    """How long after each loss the next VM is asked for; in each life the job comes as far as `steps`, or a
    worker does what `live` says, and what `end` says happens before the loss."""
    pauses = list[float]()
    for number in range(20):
        if end is not None:
            end(script, worker)
        lose(script, vm_of(worker))
        lost_at, before = script.now, set(script.state.vms)
        while script.state.waiting is None and set(script.state.vms) == before:
            script.wait(1.0)
        if script.state.waiting is not None:
            break
        pauses.append(script.now - lost_at)
        worker = f"{next(vm for vm in script.state.vms if vm not in before)}.0"
        if live is not None:
            live(script, worker)
        else:
            train_on(script, worker, steps[number] if number < len(steps) else 0)
    return pauses


def test_a_sample_that_ends_its_machine_has_pauses_grow_and_then_a_person_asked() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker)
    assert pauses == [1.0, 5.0, 10.0, 20.0, 40.0]
    asked = script.last(PersonNeeded)
    assert "lost 6 times in a row before step 1 was committed" in asked.reason
    assert asked.offers == (Resumption.AGAIN,)
    assert not script.state.live_vms  # waiting costs nothing
    script.wait(100_000.0)
    assert not script.state.live_vms


def test_a_person_who_has_it_go_on_begins_the_count_anew() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses_until_a_person_is_asked(script, worker)
    before = set(script.state.vms)
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    script.wait(1.0)
    (vm,) = set(script.state.vms) - before
    train_on(script, f"{vm}.0")
    assert len(pauses_until_a_person_is_asked(script, f"{vm}.0")) == 5


def test_steps_that_were_done_before_are_no_progress_of_lost_vms() -> None:
    """It goes on from an older checkpoint, and comes to the same step each time."""
    script = Script()
    worker = script.run(1)[0]
    script.report(script.change(worker, step=7))
    assert pauses_until_a_person_is_asked(script, worker, steps=(7, 7, 7, 7, 7)) == [
        1.0,
        5.0,
        10.0,
        20.0,
        40.0,
    ]
    assert "before step 8 was committed" in script.last(PersonNeeded).reason


def test_losses_with_new_steps_in_between_are_free() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker, steps=tuple(range(1, 11)))
    assert pauses[:11] == [1.0] * 11
    assert pauses[11:] == [5.0, 10.0, 20.0, 40.0]


def test_vms_that_are_lost_together_are_lost_once() -> None:
    script = Script()
    workers = script.run(4)
    for worker in workers:
        script.wait(5.0)
        lose(script, vm_of(worker))
    assert script.state.strikes.count(Kind.LOST_VM) == 1
    assert script.state.waiting is None


@pytest.mark.parametrize("end", ["left", "lease"])
def test_however_a_machine_ends_it_counts(end: str) -> None:
    script = Script()
    worker = script.run(1)[0]
    if end == "left":
        script.extra[vm_of(worker)] = {"leaving": "its agent was told to end"}
        script.report()
    else:
        script.event(ConnectionClosed(now=script.now, vm=vm_of(worker)))
        for _ in range(int(script.timing.given_up_after_s / 5.0) + 4):
            script.wait(5.0)
    assert script.state.vms[vm_of(worker)].reason in (EndReason.LEFT, EndReason.LEASE_EXPIRED)
    assert script.state.strikes.count(Kind.LOST_VM) == 1


def test_a_notice_that_a_machine_gives_itself_explains_nothing() -> None:
    """A job's code can tell its agent to end."""
    script = Script()
    worker = script.run(1)[0]
    script.extra[vm_of(worker)] = {"notice_deadline_s": 30.0}
    script.report()
    lose(script, vm_of(worker))
    assert script.state.strikes.count(Kind.LOST_VM) == 1


def _prepare(script: Script, worker: str) -> None:
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash=RECIPE.graph_hash))
    if script.state.planned is None:
        script.wait(5.0)
    script.answer(1, 1)
    script.prepare()


def _start(script: Script, worker: str) -> None:
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.STARTING))
    script.wait(5.0)


def _trace(script: Script, worker: str) -> None:
    script.report(WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, profiling=Profiling()))


def _open(script: Script, worker: str) -> None:
    _prepare(script, worker)
    script.open()


def _form(script: Script, worker: str) -> None:
    _open(script, worker)
    current = script.state.current
    assert current is not None
    script.report(script.change(worker, phase=Phase.FORMING, generation=current.number))


@pytest.mark.parametrize("live", [_start, _trace, _prepare, _open, _form])
def test_a_vm_that_is_lost_before_its_generation_forms_counts_as_one_that_trains(
    live: Callable[[Script, str], None],
) -> None:
    """Found: each was asked for again after a second, without a bound."""
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker, live=live)
    assert pauses == [1.0, 5.0, 10.0, 20.0, 40.0]
    assert "before step 1 was committed" in script.last(PersonNeeded).reason


def test_a_vm_that_is_lost_while_the_model_is_measured_counts() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 1})
    script.wait(1.0)
    (vm,) = script.state.vms
    _trace(script, f"{vm}.0")
    assert pauses_until_a_person_is_asked(script, f"{vm}.0", live=_trace) == [1.0, 5.0, 10.0, 20.0, 40.0]


def _start_again(script: Script, worker: str) -> None:
    """Its agent sees the trainer end, and starts the next."""
    script.report(script.change(worker, phase=Phase.EXITED, failure=DEATH))
    script.wait(1.0)
    script.report(WorkerReport(worker=worker, incarnation=2, phase=Phase.STARTING))
    script.wait(1.0)


def _end_manager(script: Script, worker: str) -> None:
    """A new manager sees that the VM is gone before it hears of it."""
    script.state, script.observations = fold(script.facts), Observations()
    script.event(ManagerStarted(now=script.now))


@pytest.mark.parametrize("end", [_start_again, _end_manager])
def test_a_loss_counts_whatever_was_last_heard_of_the_vm(end: Callable[[Script, str], None]) -> None:
    """Found: a trainer that ended just before its machine, or a manager that had just begun, hid the loss."""
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker, end=end)
    assert pauses == [1.0, 5.0, 10.0, 20.0, 40.0]


def test_steps_that_a_new_manager_has_not_heard_of_are_no_progress_later() -> None:
    script = Script()
    worker = script.run(1)[0]
    script.report(script.change(worker, step=7))

    def end(script: Script, worker: str) -> None:
        if script.state.strikes.count(Kind.LOST_VM):
            _end_manager(script, worker)

    def live(script: Script, worker: str) -> None:
        train_on(script, worker, step=5)

    pauses = pauses_until_a_person_is_asked(script, worker, live=live, end=end)
    assert pauses == [1.0, 5.0, 10.0, 20.0, 40.0]
    assert "before step 8 was committed" in script.last(PersonNeeded).reason


def test_a_vm_that_joined_after_the_first_loss_is_another_try_in_the_same_generation() -> None:
    script = Script()
    worker = script.run(1)[0]
    for number in range(4):
        lose(script, vm_of(worker))
        assert script.state.strikes.count(Kind.LOST_VM) == number + 1
        while not script.state.live_vms:
            script.wait(1.0)
        worker = f"{script.state.live_vms[0].vm}.0"
        _start(script, worker)


def _taken_as_soon_as_it_joined(script: Script, how: str) -> float:
    """The pause after its cloud took a VM that had joined seconds ago; then the next one joins."""
    (vm,) = (vm.vm for vm in script.state.live_vms)
    script.wait(5.0)
    if how == "ending":
        script.event(VmEndingSeen(now=script.now, vm=vm, taken_back=TAKEN))
        script.workers.clear()
    elif how == "noticed":
        script.extra[vm] = {"notice_deadline_s": 30.0}
        script.report()
        lose(script, vm)
    else:
        lose(script, vm, taken_back=TAKEN)
    taken_at, asked = script.now, script.count(RequestVm)
    while script.count(RequestVm) == asked and script.now < taken_at + 1000.0:
        script.wait(1.0)
    pause_s = script.now - taken_at
    pass_time(script, 55.0)
    succeed(script)
    _trace(script, f"{script.last(RequestVm).vm}.0")
    return pause_s


@pytest.mark.parametrize("how", ["gone", "ending", "noticed"])
def test_a_vm_that_is_taken_back_soon_after_it_joined_is_asked_for_elsewhere_after_longer_pauses(
    how: str,
) -> None:
    """Found: one zone was asked each time, after a second; others, never."""
    script = rented(Script(), offer("a"), offer("b"), max_nodes=1)
    pauses = [_taken_as_soon_as_it_joined(script, how) for _ in range(16)]
    zones = [it.attempt.placement.zone for it in script.facts if isinstance(it, AttemptMade)]
    assert all(zone != before for before, zone in pairwise(zones))
    assert max(pauses[:4]) <= 5.0
    assert 200.0 < max(pauses[-2:]) <= 300.0
    assert not script.count(PersonNeeded)


def _measured(script: Script, worker: str) -> None:
    """The worker has measured the model, and meets the recipe."""
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(worker, profile=profile, profiling=None))
    script.report(*(script.change(it, graph_hash=RECIPE.graph_hash, profiling=None) for it in script.workers))


def test_a_step_forgives_a_place_that_took_vms_back() -> None:
    script = rented(Script(), offer("a"), max_nodes=1)
    assert [_taken_as_soon_as_it_joined(script, "gone") for _ in range(4)] == [5.0, 10.0, 20.0, 40.0]
    (worker,) = script.workers
    _measured(script, worker)
    train_on(script, worker, step=3)
    lose(script, vm_of(worker), taken_back=TAKEN)
    asked = script.count(RequestVm)
    script.wait(1.0)
    assert script.count(RequestVm) == asked + 1, "a step was made with it: its place is no worse than others"
    pass_time(script, 55.0)
    _trace(script, f"{script.last(RequestVm).vm}.0")
    assert _taken_as_soon_as_it_joined(script, "gone") == 5.0


def _trains_in_cloud(num_vms: int) -> Script:
    """A job whose generation 1 runs on VMs of a cloud."""
    script = rented(Script(), offer("a"), max_nodes=num_vms)
    pass_time(script, 5.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    assert len(workers) == num_vms
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    _measured(script, workers[0])
    script.answer(1, num_vms)
    script.prepare()
    script.open()
    script.form()
    return script


@pytest.mark.parametrize("step", [0, 3])
def test_vms_that_their_cloud_takes_one_by_one_call_for_no_person(step: int) -> None:
    """Found: six of eight were lost within half a minute, with a generation after each."""
    script = _trains_in_cloud(4)
    if step:
        script.report(*(script.change(worker, step=step) for worker in script.workers))
    for num_left in (3, 2, 1):
        lose(script, vm_of(min(script.workers)), taken_back=TAKEN)
        script.report(*(script.change(worker, phase=Phase.IDLE, lost=[]) for worker in script.workers))
        script.wait(5.0)
        script.answer(1, num_left if num_left != 3 else 2)
        script.prepare()
        script.open()
        script.form(step=step)
    lose(script, vm_of(min(script.workers)), taken_back=TAKEN)
    (place,) = script.state.strikes.all(Kind.TAKEN_VM) or ("",)
    assert script.state.strikes.count(Kind.TAKEN_VM, place) == (0 if step else 1), "that is one event"
    assert not script.state.strikes.count(Kind.LOST_VM)
    assert not script.count(PersonNeeded)
