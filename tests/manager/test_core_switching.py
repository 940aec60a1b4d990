"""When a step is interrupted for the next generation, and when its end is waited for."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script
from makara.manager.core import apply, fold
from makara.manager.core.events import DrainRequested, ManagerStarted
from makara.manager.core.facts import GenerationOpened, StepInterrupted, WorkerPaced
from makara.manager.core.orders import orders
from makara.manager.core.state import vm_of
from makara.protocol.messages import (
    KEEPS_STEPS,
    Formed,
    KeptContributions,
    Phase,
    StepMetrics,
    WorkerReport,
)

STEP_S = 100.0


def running(num_vms: int, **changes: dict[str, Any]) -> tuple[Script, list[str]]:
    """A job whose steps take 100 s, in its first step."""
    script = Script(predicted_s=STEP_S)
    workers = script.run(num_vms, **changes)
    script.report(*(script.change(worker, trainer_protocol=KEEPS_STEPS) for worker in workers))
    return script, workers


def notice(script: Script, worker: str, deadline_s: float) -> None:
    """The cloud takes the worker's VM, and a plan without it is about to be opened."""
    script.extra[vm_of(worker)] = {"notice_deadline_s": deadline_s, "notices_known": True}
    script.report()
    script.answer(2, 1)
    script.prepare()


def join(script: Script, worker: str) -> None:
    """A VM that was waited for is there, and all settles."""
    script.report(
        WorkerReport(
            worker=worker,
            incarnation=1,
            phase=Phase.IDLE,
            graph_hash="5ec7",
            trainer_protocol=KEEPS_STEPS,
        )
    )
    script.wait(4.0)
    script.report()


def interruption(script: Script) -> StepInterrupted | None:
    return script.last(StepInterrupted) if script.count(StepInterrupted) else None


# ---- notices -----------------------------------------------------------------------------------------------


def test_after_a_restart_the_step_under_way_may_have_just_begun() -> None:
    """Found: it was taken to end at once, if the generation had formed longer ago than a step takes."""
    script, workers = running(4)
    for _ in range(2000):  # steps are done all the time; the newest report of one is lost with the manager
        script.wait(0.25)
    script.event(ManagerStarted(now=script.now))
    script.report()
    notice(script, workers[3], 30.0)
    script.open()
    assert interruption(script) is not None


def test_a_step_that_would_outlast_a_notice_is_interrupted_when_the_plan_is_opened() -> None:
    script, workers = running(4)
    script.wait(10.0)
    notice(script, workers[3], 30.0)
    assert interruption(script) is None
    script.open()
    found = script.last(StepInterrupted)
    assert (found.number, found.superseded) == (2, 1)
    assert found.at == script.last(GenerationOpened).at
    assert found.reason == f"{vm_of(workers[3])} is gone in 30 s, and the step ends in 90 s"
    told = orders(script.state, vm_of(workers[3]))
    assert told.generation is not None
    assert (told.abandoned, told.generation.number, told.generation.phase) == (1, 2, "go")
    script.form()
    script.wait(1.0)
    assert script.count(StepInterrupted) == 1
    assert script.state.running
    assert fold(script.facts) == script.state


@pytest.mark.parametrize(
    ("waited_s", "deadline_s"),
    [
        (80.0, 30.0),  # the step ends before it
        (10.0, 4.0),  # the change does not
        (97.0, 4.0),
        (150.0, 30.0),  # the step should have ended long ago: nothing is known of its end
    ],
)
def test_otherwise_its_end_is_waited_for(waited_s: float, deadline_s: float) -> None:
    script, workers = running(4)
    script.wait(waited_s)
    script.report()
    notice(script, workers[3], deadline_s)
    script.open()
    assert interruption(script) is None
    assert script.state.abandoned == 0


def test_a_notice_that_comes_while_the_step_is_waited_for_interrupts_it() -> None:
    script, workers = running(4)
    script.wait(10.0)
    notice(script, workers[3], 200.0)
    script.open()
    assert interruption(script) is None
    script.extra[vm_of(workers[2])] = {"notice_deadline_s": 30.0, "notices_known": True}
    script.report()
    assert interruption(script) is not None


def test_a_drain_waits_for_the_end_of_the_step() -> None:
    """Nobody takes the VM before that."""
    script, workers = running(4)
    script.event(DrainRequested(now=script.now, vm=vm_of(workers[3])))
    script.answer(2, 1)
    script.prepare()
    script.open()
    assert interruption(script) is None


# ---- newcomers, and slow workers ---------------------------------------------------------------------------


def test_newcomers_that_would_idle_for_longer_than_a_change_takes_interrupt_the_step() -> None:
    script, workers = running(1, resources={"max_nodes": 2})
    script.wait(10.0)
    join(script, "v1.0")
    script.answer(2, 1, predicted_s=40.0)
    script.prepare()
    script.open()
    # 84 s are left, of which 60 % are saved; that is more than 5 s for the change and a quarter of the step.
    found = script.last(StepInterrupted)
    assert found.reason == "the step ends in 86 s, 52 s sooner under the new plan"
    assert workers[0] in dict(script.state.current.members)  # type: ignore[union-attr]


@pytest.mark.parametrize(("waited_s", "predicted_s"), [(60.0, 40.0), (10.0, 70.0), (10.0, 120.0)])
def test_for_less_than_that_newcomers_wait(waited_s: float, predicted_s: float) -> None:
    script, _ = running(1, resources={"max_nodes": 2})
    script.wait(waited_s)
    join(script, "v1.0")
    script.answer(2, 1, predicted_s=predicted_s)
    script.prepare()
    script.open()
    assert interruption(script) is None


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_left_of_the_step_is_told_from_what_the_last_one_took(slow: bool) -> None:
    """And what a new plan saves, if a worker turned out slow since the old one was planned."""
    script, workers = running(1, resources={"max_nodes": 2})
    script.wait(300.0)
    measured = StepMetrics(step=1, generation=1, loss=1.0, grad_norm=1.0, seconds=300.0, samples=8)
    script.extra[vm_of(workers[0])] = {"metrics": [measured]}
    script.report(script.change(workers[0], step=1))
    script.extra.clear()
    if slow:
        paced = WorkerPaced(at=script.now, worker=workers[0], incarnation=1, slowdown=3.0)
        script.facts.append(paced)
        script.state = apply(script.state, paced)
    script.wait(10.0)
    join(script, "v1.0")
    script.answer(2, 1, predicted_s=100.0)
    script.prepare()
    script.open()
    assert (interruption(script) is not None) == slow


def test_of_the_rest_of_a_step_only_the_rest_is_waited_for() -> None:
    script, workers = running(4)
    script.wait(10.0)
    notice(script, workers[3], 30.0)
    script.open()
    rest = KeptContributions(kept=6, moved=0, missing=2)
    formed = Formed(generation=2, step=0, rung="peers", phases_s={"load": 0.5}, in_flight=rest)
    changes = {"phase": Phase.RUNNING, "generation": 2, "formed": formed}
    script.report(*(script.change(worker, **changes) for worker in workers[:2]))
    assert script.state.running
    script.extra[vm_of(workers[1])] = {"notice_deadline_s": 30.0, "notices_known": True}
    script.report()
    script.answer(1, 1)
    script.prepare()
    script.open()
    assert script.count(StepInterrupted) == 1  # it ends in 25 s


# ---- when nothing is interrupted ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["older trainers", "one that holds", "one that is unheard", "a new manager"])
def test_no_step_is_interrupted_with(what: str) -> None:
    script, workers = running(4)
    script.wait(10.0)
    notice(script, workers[3], 60.0)
    match what:
        case "older trainers":
            script.report(*(script.change(w, trainer_protocol=KEEPS_STEPS - 1) for w in workers))
        case "one that holds":
            script.report(script.change(workers[0], phase=Phase.HELD))
        case "one that is unheard":
            for _ in range(16):
                script.wait(1.0)
                script.report(silent=(vm_of(workers[0]),))
            script.wait()
            assert vm_of(workers[0]) in script.observations.unheard
        case _:
            script.event(ManagerStarted(now=script.now))
    script.open()
    assert script.state.current is not None
    assert script.state.current.number == 2
    assert interruption(script) is None


def test_a_new_manager_interrupts_once_it_has_heard_all() -> None:
    script, workers = running(4)
    script.wait(10.0)
    notice(script, workers[3], 60.0)
    script.event(ManagerStarted(now=script.now))
    script.open()
    assert interruption(script) is None
    script.report()
    assert interruption(script) is not None
