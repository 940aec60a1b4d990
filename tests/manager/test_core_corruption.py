"""Hosts of a section held different state: all go back, and the VM that is wrong is replaced."""

from __future__ import annotations

from typing import Literal

import pytest
from core_script import Script
from makara.manager.core import fold
from makara.manager.core.events import ResumeRequested
from makara.manager.core.facts import (
    EndReason,
    GenerationClosed,
    PersonNeeded,
    Resumption,
    StateCorrupted,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import vm_of
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import CheckpointRef, Corruption, Failure, Phase, WorkerReport


def _tell(script: Script, workers: list[str], suspects: list[str], *, majority: bool = False) -> int:
    """All tell of a corruption in their generation; returns its number."""
    current = script.state.current
    assert current is not None
    _report(script, workers, suspects, current.number, majority=majority)
    return current.number


def _report(
    script: Script, workers: list[str], suspects: list[str], generation: int, *, majority: bool = False
) -> None:
    found = Corruption(generation=generation, step=9, sections=[1], suspects=suspects, has_majority=majority)
    script.report(*(script.change(worker, phase=Phase.BROKEN, corruption=found) for worker in workers))


def _go_on(script: Script, step: int = 0, rung: Literal["start", "peers", "store"] = "start") -> None:
    """The next generation forms."""
    _open_next(script)
    script.form(step=step, rung=rung)


def _open_next(script: Script, replicas: int = 2) -> None:
    _plan_next(script, replicas)
    script.prepare()
    script.open()


def _plan_next(script: Script, replicas: int) -> None:
    for _ in range(8):  # longer than the pause after several
        script.wait(5.0)
        script.report()
    script.answer(1, replicas)


def _lose_first(script: Script, workers: list[str]) -> int:
    """The first worker cannot be heard when it finds a difference, and the second was interrupted before.

    Returns the number of their generation.
    """
    number = script.state.last_generation
    script.report(
        script.change(workers[0], phase=Phase.EXITED, failure=Failure(kind="killed", message="x")),
        script.change(workers[1], phase=Phase.IDLE),
    )
    return number


def _hear_first(script: Script, workers: list[str], number: int) -> None:
    found = Corruption(generation=number, step=9, sections=[1], suspects=[], has_majority=False)
    script.report(WorkerReport(worker=workers[0], incarnation=2, phase=Phase.IDLE, corruption=found))


def test_it_is_recorded_once_and_its_generation_is_closed_at_once_with_the_cause() -> None:
    script = Script()
    workers = script.run(3)
    number = _tell(script, workers, [])
    told = script.last(StateCorrupted)
    assert (told.corruption.step, told.corruption.sections) == (9, [1])
    closed = script.last(GenerationClosed)
    assert (closed.number, closed.reason) == (number, "hosts of section 1 held different state at step 9")
    script.wait(1.0)
    script.report()
    assert script.count(StateCorrupted) == 1
    assert fold(script.facts).void_until == script.state.void_until == number
    assert not any(vm.reason is EndReason.CORRUPT_STATE for vm in script.state.vms.values())


def test_the_minoritys_vm_is_replaced_at_once() -> None:
    script = Script()
    workers = script.run(3)
    _tell(script, workers, [workers[2]], majority=True)
    ended = [vm.vm for vm in script.state.vms.values() if vm.reason is EndReason.CORRUPT_STATE]
    assert ended == [vm_of(workers[2])]


def test_without_a_majority_each_suspect_has_a_strike_and_the_second_replaces_it() -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    _tell(script, workers, workers)
    for worker in workers:
        assert script.state.strikes.count(Kind.CORRUPT_STATE, vm_of(worker)) == 1
        assert script.state.vms[vm_of(worker)].live
    _go_on(script)
    _tell(script, workers, [workers[0]])
    script.wait(1.0)
    assert script.state.vms[vm_of(workers[0])].reason is EndReason.CORRUPT_STATE
    assert script.state.vms[vm_of(workers[1])].live


def test_members_of_later_generations_are_told_which_states_are_void() -> None:
    script = Script()
    workers = script.run(2)
    number = _tell(script, workers, [])
    _go_on(script)
    generation = orders(script.state, vm_of(workers[0])).generation
    assert generation is not None
    assert generation.number > number == generation.void_until


def test_differences_that_come_again_and_again_are_a_question_to_a_person() -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    for times in range(1, 5):
        assert script.state.waiting is None
        _tell(script, workers, [])
        assert script.state.strikes.count(Kind.DIFFERENCE) == times
        if times < 4:
            _go_on(script)
    assert "deterministic?" in script.last(PersonNeeded).reason
    plans = script.num_plans
    script.wait(5.0)
    script.report()
    assert script.num_plans == plans
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    assert script.state.strikes.count(Kind.DIFFERENCE) == 0
    _go_on(script)
    _tell(script, workers, [])
    assert script.state.waiting is None


def test_only_a_newer_checkpoint_forgives_differences() -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    for step, count in ((10, 1), (10, 2), (5, 3), (20, 1), (20, 2)):
        published = CheckpointRef(step=step, generation=script.state.last_generation)
        script.report(script.change(workers[0], published=published, step=step))
        _tell(script, workers, [])
        assert script.state.strikes.count(Kind.DIFFERENCE) == count
        _go_on(script, step=script.state.saved_step, rung="store")


@pytest.mark.parametrize("rung", ["peers", "store", None])
def test_a_later_generation_that_may_hold_such_state_is_closed_as_well(
    rung: Literal["peers", "store"] | None,
) -> None:
    """One member left before its peers found the difference, and the next generation took its state."""
    script = Script(releasing=False)
    workers = script.run(2)
    number = _lose_first(script, workers)
    _open_next(script, 1)
    if rung is not None:
        script.form(rung=rung)
    later = script.state.current
    assert later is not None
    assert later.number > number
    _hear_first(script, workers, number)
    holds_it = rung != "store"
    assert (script.state.current is None) == holds_it
    assert script.state.void_until == (later.number if holds_it else number)


def test_a_generation_that_is_prepared_when_a_difference_is_reported_learns_of_it() -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    number = _lose_first(script, workers)
    _plan_next(script, 1)
    planned = script.state.planned
    assert planned is not None
    _hear_first(script, workers, number)
    assert script.state.void_until == number
    assert script.state.planned == planned
    order = orders(script.state, vm_of(workers[1])).generation
    assert order is not None
    assert (order.number, order.void_until) == (planned.number, number)


def test_void_state_that_several_generations_passed_on_is_void_in_all_of_them() -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    number = _lose_first(script, workers)
    for rung in ("peers", "peers"):
        _open_next(script, 1)
        script.form(rung=rung)
        last = script.state.last_generation
        script.report(script.change(workers[1], phase=Phase.BROKEN, lost=[]))
        script.wait(5.0)
    _hear_first(script, workers, number)
    assert script.state.void_until == last


@pytest.mark.parametrize("majority", [False, True])
def test_suspects_that_only_a_later_report_names_have_their_strikes_once(majority: bool) -> None:
    script = Script(releasing=False)
    workers = script.run(2)
    number = _tell(script, workers[:1], [])
    _report(script, workers[1:], workers[1:], number, majority=majority)
    vm = vm_of(workers[1])
    assert script.state.vms[vm].live == (not majority)
    assert script.state.strikes.count(Kind.CORRUPT_STATE, vm) == (not majority)
    assert script.state.strikes.count(Kind.DIFFERENCE) == 1
    for _ in range(3):
        script.wait(1.0)
        script.report()
    assert script.count(StateCorrupted) == 2
    assert script.count(GenerationClosed) == 1
