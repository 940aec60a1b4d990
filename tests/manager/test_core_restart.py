"""A manager that begins anew knows what was decided and nothing of the present: it waits for word."""

from __future__ import annotations

import pytest
from core_script import Script, plan_json
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import ManagerStarted, PlanComputed, StopRequested, VmTerminated
from makara.manager.core.facts import GenerationClosed, GenerationFormed, JobEnded
from makara.protocol.messages import CheckpointRef, Formed, Phase, WorkerReport


def restart(script: Script) -> None:
    script.event(ManagerStarted(now=script.now))


def vms_of(workers: list[str]) -> tuple[str, ...]:
    return tuple(worker.rpartition(".")[0] for worker in workers)


def with_spare() -> tuple[Script, list[str], str]:
    """Four workers run generation 1, and a fifth waits, about which the planner has been asked."""
    script = Script()
    workers = script.run(4, resources={"max_nodes": 5})
    script.wait()
    spare = f"{list(script.state.vms)[4]}.0"
    script.report(WorkerReport(worker=spare, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(1.0)
    script.answer(2, 2)  # what runs: the spare finds no place
    script.report(*(script.change(w, step=9) for w in workers))
    return script, workers, spare


def test_after_a_restart_what_runs_is_not_planned_anew_before_all_its_workers_are_heard() -> None:
    script, workers, _ = with_spare()
    late = vms_of(workers[2:])
    restart(script)
    asked = script.count(ComputePlan)
    for _ in range(9):
        script.wait(0.5)
        script.report(silent=late)
    assert script.count(ComputePlan) == asked
    for _ in range(9):
        script.wait(0.5)
        script.report()
    assert len(script.last(ComputePlan).workers) == 5
    assert script.state.running


def test_after_a_restart_a_worker_that_is_never_heard_is_waited_for_for_a_lease() -> None:
    script, workers, spare = with_spare()
    gone = vms_of(workers[3:])
    restart(script)
    for _ in range(40):
        script.wait(1.0)
        script.report(silent=gone)
    assert script.last(GenerationClosed).reason.startswith(f"{workers[3]} silent")
    assert spare in [slot.worker for slot in script.last(ComputePlan).workers]


def test_an_answer_to_a_question_of_the_manager_before_plans_around_nobody_who_runs() -> None:
    """Found: a plan of the first who were back, though all others were well."""
    script, workers, spare = with_spare()
    asked = script.last(ComputePlan)
    restart(script)
    script.report(silent=vms_of(workers[2:]))
    plan = {**plan_json(1, 3), "generation": asked.generation}
    script.event(
        PlanComputed(
            now=script.now,
            generation=asked.generation,
            asked=asked.asked,
            plan=plan,
            workers=(*workers[:2], spare),
        )
    )
    assert script.state.planned is None


def survivors_of_a_death() -> tuple[Script, list[str]]:
    """Two workers hold steps up to 57, of which 40 are saved; the third has died, and nothing runs."""
    script = Script()
    workers = script.run(3)
    script.report(*(script.change(w, step=57) for w in workers))
    script.report(script.change(workers[0], published=CheckpointRef(step=40, generation=1)))
    script.event(VmTerminated(now=script.now, vm=vms_of(workers)[1]))
    del script.workers[workers[1]]
    script.report(*(script.change(w, phase=Phase.BROKEN) for w in script.workers))
    assert script.state.current is None
    return script, list(script.workers)


def test_a_manager_that_begins_anew_while_a_job_stops_has_survivors_save_what_they_hold() -> None:
    script, survivors = survivors_of_a_death()
    script.event(StopRequested(now=script.now))
    restart(script)
    assert script.state.ended is None
    script.wait(1.0)
    script.report(silent=vms_of(survivors[1:]))
    script.wait(3.0)
    script.report()
    script.wait(1.0)
    assert [slot.worker for slot in script.last(ComputePlan).workers] == survivors
    assert script.state.ended is None


def test_a_stop_just_after_a_restart_waits_until_workers_are_heard_or_their_lease_is_over() -> None:
    script, _ = survivors_of_a_death()
    restart(script)
    script.wait(1.0)
    script.event(StopRequested(now=script.now))
    assert script.state.ended is None
    for _ in range(2000):
        script.wait(1.0)
    assert script.last(JobEnded).status == "stopped"


def test_a_stop_just_after_a_restart_ends_at_once_where_nothing_ever_ran() -> None:
    script = Script()
    script.start(2)
    restart(script)
    script.event(StopRequested(now=script.now))
    assert script.last(JobEnded).reason == "as requested"


def switched() -> tuple[Script, list[str]]:
    """Generation 2 of three workers is open; it has taken over at step 100, of which 90 are saved."""
    script = Script()
    workers = script.run(2, resources={"max_nodes": 3}, training={"global_batch_size": 8, "steps": 1000})
    workers.append(f"{list(script.state.vms)[2]}.0")
    script.report(WorkerReport(worker=workers[2], incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.report(*(script.change(w, step=90) for w in workers[:2]))
    script.report(script.change(workers[0], published=CheckpointRef(step=90, generation=1)))
    script.report(*(script.change(w, step=100) for w in workers[:2]))
    script.wait(5.0)
    script.answer(1, 3)
    script.prepare()
    script.open(CheckpointRef(step=90, generation=1))
    return script, workers


def form_and_step(script: Script, workers: list[str], begun: int, step: int) -> GenerationFormed:
    """They form generation 2 at step `begun`, and are at `step` when they tell."""
    formed = Formed(generation=2, step=begun, rung="peers", phases_s={})
    there = {"phase": Phase.RUNNING, "generation": 2, "formed": formed, "step": step}
    script.report(*(script.change(w, **there) for w in workers))
    return script.last(GenerationFormed)


@pytest.mark.parametrize("restarted", [True, False])
def test_steps_that_a_generation_made_before_it_was_seen_formed_are_not_told_as_lost(restarted: bool) -> None:
    script, workers = switched()
    if restarted:
        restart(script)
    assert form_and_step(script, workers, 100, 140).lost_steps == 0
    assert script.observations.newest_step == 140


@pytest.mark.parametrize("restarted", [True, False])
def test_steps_that_are_lost_are_told_as_far_as_anybody_knew_of_them(restarted: bool) -> None:
    script, workers = switched()
    if restarted:
        restart(script)
    assert form_and_step(script, workers, 80, 140).lost_steps == (10 if restarted else 20)
