"""Trainers of two versions, as an upgrade in place brings them together: they never meet in a generation."""

from __future__ import annotations

from core_script import Script
from makara.manager.core import Timing
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import VmTerminated
from makara.manager.core.facts import GenerationPlanned
from makara.manager.core.orders import orders
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import CheckpointRef, Failure, Phase, WorkerReport


def replaced(script: Script, *workers: str) -> None:
    """These trainers die, and come back as those that were installed meanwhile."""
    dead = Failure(kind="killed", message="ended by SIGKILL")
    script.report(*(script.change(w, phase=Phase.EXITED, failure=dead) for w in workers))
    come_back(script, *workers)


def come_back(script: Script, *workers: str, protocol: int = 1) -> None:
    script.report(
        *(
            WorkerReport(
                worker=w,
                incarnation=script.workers[w].incarnation + 1,
                phase=Phase.IDLE,
                graph_hash="5ec7",
                trainer_protocol=protocol,
            )
            for w in workers
        )
    )
    script.wait(5.0)


def broken(script: Script, *workers: str) -> None:
    script.report(*(script.change(w, phase=Phase.BROKEN) for w in workers))


def asked_for(script: Script) -> list[str]:
    return [slot.worker for slot in script.last(ComputePlan).workers]


def test_a_trainer_of_a_newer_version_is_not_planned_with_older_ones() -> None:
    script = Script()
    a, b, c, d = script.run(4)
    broken(script, a, b, c)
    replaced(script, d)
    script.wait(script.timing.planning_timeout_s)  # it is asked again
    assert asked_for(script) == [a, b, c]


def test_the_version_that_most_vms_have_goes_on() -> None:
    script = Script()
    a, b, c, d = script.run(4)
    broken(script, a)
    replaced(script, b, c, d)
    script.wait(script.timing.planning_timeout_s)  # it was asked when the first of them was back
    assert asked_for(script) == [b, c, d]
    script.answer(1, 3)
    assert [worker for worker, _ in script.last(GenerationPlanned).members] == [b, c, d]  # no older donor


def test_a_generation_that_runs_is_not_given_up_for_newer_trainers() -> None:
    script = Script()
    a, b, c, d = script.run(4)
    broken(script, a, b)
    replaced(script, c, d)
    assert asked_for(script) == [c, d]  # as many of each: the newer
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    before = script.count(ComputePlan)
    script.report(script.change(a, phase=Phase.IDLE, generation=0))
    script.wait(5.0)
    assert script.count(ComputePlan) == before


def upgraded_pair() -> tuple[Script, list[str]]:
    """The newer two of four run; the older two wait."""
    script = Script()
    workers = script.run(4)
    broken(script, *workers[:2])
    replaced(script, *workers[2:])
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    script.wait(1.0)
    return script, workers


def test_older_trainers_that_wait_are_started_anew_and_taken_in() -> None:
    script, (a, b, c, d) = upgraded_pair()
    for worker in (a, b):
        assert orders(script.state, worker[:-2]).given_up == {worker: 1}
    assert script.state.strikes.count(Kind.INTERNAL_ERROR) == 0  # nothing failed
    come_back(script, a, b)
    assert asked_for(script) == [a, b, c, d]


def test_a_trainer_that_comes_back_as_old_is_not_started_anew_again_and_again() -> None:
    script, (a, b, *_) = upgraded_pair()
    come_back(script, a, b, protocol=0)
    for _ in range(10):
        script.wait(5.0)
    assert orders(script.state, a[:-2]).given_up == {a: 1}


def test_nothing_is_asked_of_trainers_whose_vm_is_gone() -> None:
    script, (a, b, *_) = upgraded_pair()
    assert script.state.strikes.all(Kind.OUTDATED).keys() == script.state.given_up.keys() == {a, b}
    script.event(VmTerminated(now=script.now, vm=a[:-2]))
    assert script.state.strikes.all(Kind.OUTDATED).keys() == script.state.given_up.keys() == {b}


def newcomers() -> tuple[Script, list[str], list[str]]:
    """Two older trainers run; two VMs with newer ones are about to join."""
    script = Script()
    older = script.run(2, resources={"max_nodes": 4})
    return script, older, [f"{vm}.0" for vm in list(script.state.vms)[2:]]


def join(script: Script, *workers: str) -> None:
    new = [WorkerReport(worker=w, incarnation=0, phase=Phase.STARTING) for w in workers]
    script.report(*new)
    come_back(script, *workers)


def hold(script: Script, *workers: str) -> None:
    saved = CheckpointRef(step=7, generation=1)
    script.report(*(script.change(w, phase=Phase.HELD, step=7, published=saved) for w in workers))
    script.wait(5.0)


def is_told_to_hold(script: Script, worker: str) -> bool:
    return orders(script.state, worker[:-2]).hold


def test_an_older_generation_saves_and_gives_way_to_as_many_newer_trainers() -> None:
    """Found: the newer waited for ever, and were paid for."""
    script, (a, b), (c, d) = newcomers()
    join(script, c)
    assert not is_told_to_hold(script, a)  # one newer image is no reason to stop two
    join(script, d)
    assert is_told_to_hold(script, a)
    assert script.state.running  # nothing is closed before it is saved
    hold(script, a, b)
    assert asked_for(script) == [c, d]
    script.answer(2, 1)
    script.prepare()
    script.open(CheckpointRef(step=7, generation=1))
    script.form(step=7)
    script.wait(1.0)
    assert not is_told_to_hold(script, c)
    for worker in (a, b):
        assert orders(script.state, worker[:-2]).given_up == {worker: 1}
    come_back(script, a, b)
    assert asked_for(script) == [a, b, c, d]


def test_who_held_goes_on_when_the_newer_trainers_are_gone_meanwhile() -> None:
    script, (a, b), (c, d) = newcomers()
    join(script, c, d)
    assert is_told_to_hold(script, a)
    script.event(VmTerminated(now=script.now, vm=d[:-2]))
    hold(script, a, b)
    assert asked_for(script) == [a, b]
    script.answer(2, 1)
    script.prepare()
    script.open(CheckpointRef(step=7, generation=1))
    assert not is_told_to_hold(script, a)


def test_a_notice_is_answered_before_a_generation_gives_way() -> None:
    script, (a, b), (c, d) = newcomers()
    script.extra[a[:-2]] = {"notice_deadline_s": 60.0}
    join(script, c, d)
    assert asked_for(script) == [b]
    assert not is_told_to_hold(script, a)


def save(script: Script, *workers: str) -> None:
    """All hold, and have published what they hold."""
    saved = CheckpointRef(step=57, generation=1)
    script.report(*(script.change(w, phase=Phase.HELD, step=57, published=saved) for w in workers))
    script.wait(1.0)


def four_and_three() -> tuple[Script, list[str], list[str]]:
    """Four older trainers run, of which three are needed at least; three newer wait."""
    script = Script()
    older = script.run(4, resources={"max_nodes": 7, "min_nodes": 3})
    script.wait()
    newer = [f"{vm}.0" for vm in list(script.state.vms)[4:7]]
    join(script, *newer)
    script.wait(5.0)
    assert script.state.current is not None
    assert len(script.state.current.incarnations) == 4
    assert not script.state.hold
    return script, older, newer


def test_a_notice_that_leaves_newer_trainers_only_is_answered_by_saving_first() -> None:
    """Found: the newer were planned at once, and the steps since the last checkpoint were lost."""
    script, (a, b, c, d), newer = four_and_three()
    for worker in (a, b):
        script.extra[worker[:-2]] = {"notice_deadline_s": 300.0}
    script.report()
    script.wait(1.0)
    assert is_told_to_hold(script, c)
    assert script.state.planned is None
    save(script, a, b, c, d)
    assert asked_for(script) == newer


def test_a_generation_does_not_give_way_while_a_member_is_not_heard() -> None:
    """Found: it was not counted, so that the newer seemed to be as many."""
    script, (a, b, c, d), _ = four_and_three()
    for step in range(1, 19):
        script.wait(1.0)
        script.report(*(script.change(w, step=step) for w in (a, b, c)), silent=(d[:-2],))
    assert script.observations.unheard == {d[:-2]}
    assert not script.state.hold


def test_a_trainer_that_was_once_stuck_is_started_anew_all_the_same() -> None:
    """Found: it waited for ever, of the version before."""
    script = Script(timing=Timing(start_wait_s=4.0))
    a, b, c, d = script.run(4)
    broken(script, a, b)
    script.report(WorkerReport(worker=a, incarnation=2, phase=Phase.STARTING))
    script.wait(5.0)
    assert orders(script.state, a[:-2]).given_up == {a: 2}
    come_back(script, a, protocol=0)
    replaced(script, c, d)
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form()
    script.wait(1.0)
    assert orders(script.state, a[:-2]).given_up == {a: 3}
    assert orders(script.state, b[:-2]).given_up == {b: 1}


def test_newer_trainers_that_never_step_lose_the_tie_for_a_while() -> None:
    """Found: old and new alternated for ever, or the new stood still and were chosen again."""
    script, (a, b), (c, d) = newcomers()
    join(script, c, d)
    hold(script, a, b)
    assert asked_for(script) == [c, d]
    script.answer(2, 1)
    script.prepare()
    script.open(CheckpointRef(step=7, generation=1))
    script.report(*(script.change(w, phase=Phase.FORMING, generation=2) for w in (c, d)))
    fault = Failure(kind="internal", message="a fault of the newer version")
    script.report(*(script.change(w, phase=Phase.EXITED, failure=fault) for w in (c, d)))
    come_back(script, c, d)
    assert asked_for(script) == [a, b]
    script.answer(2, 1)
    script.prepare()
    script.open(CheckpointRef(step=7, generation=1))
    script.form(step=7)
    script.wait(5.0)
    assert not is_told_to_hold(script, a)
    assert script.state.running
    for _ in range(80):
        script.report()
        script.wait(5.0)
    assert is_told_to_hold(script, a)  # they are given another chance
