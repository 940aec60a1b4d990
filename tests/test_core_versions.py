"""Trainers of two versions, as an upgrade in place brings them together: they never meet in a generation."""

from __future__ import annotations

from core_script import Script
from makara.manager.commands import ComputePlan
from makara.manager.facts import GenerationPlanned
from makara.manager.orders import orders
from makara.worker.messages import Failure, Phase, WorkerReport


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
    assert script.state.internal_errors.count == 0  # nothing failed
    come_back(script, a, b)
    assert asked_for(script) == [a, b, c, d]


def test_a_trainer_that_comes_back_as_old_is_not_started_anew_again_and_again() -> None:
    script, (a, b, *_) = upgraded_pair()
    come_back(script, a, b, protocol=0)
    for _ in range(10):
        script.wait(5.0)
    assert orders(script.state, a[:-2]).given_up == {a: 1}
