"""Hosts of a section held different state: all go back, and the VM that is wrong is replaced."""

from __future__ import annotations

from core_script import Script
from makara.manager.core import fold
from makara.manager.core.facts import EndReason, GenerationClosed, StateCorrupted
from makara.manager.core.orders import orders
from makara.manager.core.state import vm_of
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import Corruption, Phase


def _tell(script: Script, workers: list[str], suspects: list[str], *, majority: bool = False) -> int:
    """All tell of a corruption in their generation; returns its number."""
    current = script.state.current
    assert current is not None
    found = Corruption(
        generation=current.number, step=9, sections=[1], suspects=suspects, has_majority=majority
    )
    script.report(*(script.change(worker, phase=Phase.BROKEN, corruption=found) for worker in workers))
    return current.number


def _go_on(script: Script) -> None:
    """The next generation forms."""
    script.wait(5.0)
    script.report()
    script.answer(1, 2)
    script.prepare()
    script.open()
    script.form()


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
