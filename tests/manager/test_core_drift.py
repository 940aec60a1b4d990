"""When steps take other times than the calibration says, and when one worker is slower than its peers."""

from __future__ import annotations

import random

import pytest
from core_script import Script
from hypothesis import given
from hypothesis import strategies as st
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import ManagerStarted
from makara.manager.core.facts import GenerationPlanned, PlanKept, Recalibrated, WorkerPaced
from makara.manager.core.rules.drift import common_paces

SECTION_S = 3.0  # F and B of each of the two sections, as calibrated


def steps(script: Script, workers: list[str], count: int, step_s: float = 4.0, **slow: float) -> None:
    """So many steps of `step_s`, as workers time them: as calibrated, or so many times longer, by VM."""
    current = script.state.current
    assert current is not None
    for _ in range(count):
        for rank, (worker, _) in enumerate(current.incarnations):
            start, stop = current.plan["ranges"][rank]
            took_s = SECTION_S * (stop - start) * slow.get(worker.partition(".")[0], slow.get("all", 1.0))
            step = script.workers[worker].step + 1
            script.report(script.change(worker, step=step, forward_s=took_s / 3, backward_s=2 * took_s / 3))
        script.wait(step_s)


def job(num_vms: int, *, halves: bool = False, **training: int) -> tuple[Script, list[str]]:
    script = Script(halves=halves)
    return script, script.run(num_vms, training={"global_batch_size": 8, "steps": 100_000, **training})


def concluded(script: Script) -> list[Recalibrated | WorkerPaced]:
    return [fact for fact in script.facts if isinstance(fact, Recalibrated | WorkerPaced)]


def test_a_run_that_is_slower_than_calibrated_changes_its_calibration_once() -> None:
    script, workers = job(4)
    steps(script, workers, 30, all=2.0)
    assert concluded(script) == [Recalibrated(at=concluded(script)[0].at, scales=(2.0, 2.0))]
    calibration = script.state.calibration
    assert calibration is not None
    assert (calibration["forward_s"], calibration["backward_s"]) == ([2.0, 2.0], [4.0, 4.0])
    steps(script, workers, 170, all=2.0)
    assert len(concluded(script)) == 1  # it fits now


def test_steps_in_halves_are_compared_with_the_halves_that_were_calibrated() -> None:
    script, workers = job(4, halves=True)
    steps(script, workers, 30, all=4 / 3)  # F = 1 s, I = W = 1.5 s
    assert not concluded(script)
    script, workers = job(4, halves=True)
    steps(script, workers, 30, all=2 * 4 / 3)
    calibration = script.state.calibration
    assert calibration is not None
    assert [calibration[name] for name in ("backward_s", "input_s", "weight_s")] == [
        [4.0, 4.0],
        [3.0, 3.0],
        [3.0, 3.0],
    ]


def test_a_section_that_is_slower_on_all_its_hosts_is_changed_alone() -> None:
    script, workers = job(4)
    late = {worker.partition(".")[0]: 1.6 for worker in (workers[1], workers[3])}  # the second stage
    steps(script, workers, 30, **late)
    assert [fact.scales for fact in concluded(script) if isinstance(fact, Recalibrated)] == [(1.0, 1.6)]


def test_one_noisy_minute_changes_nothing() -> None:
    script, workers = job(4)
    for _ in range(10):
        steps(script, workers, 12, all=1.0)
        steps(script, workers, 6, all=3.0)
    assert not concluded(script)


def test_a_few_noisy_seconds_change_nothing_however_many_steps_they_hold() -> None:
    script, workers = job(2)
    steps(script, workers, 20)
    for _ in range(3):
        steps(script, workers, 100, step_s=0.1, all=3.0)
        steps(script, workers, 20, step_s=1.0)
    assert not concluded(script)


def test_the_planner_is_asked_whether_another_plan_is_worth_a_change() -> None:
    script, workers = job(4)
    asked = script.count(ComputePlan)
    steps(script, workers, 30, all=2.0)
    assert script.count(ComputePlan) == asked + 1
    assert script.last(ComputePlan).reconsider
    assert script.last(ComputePlan).least_gain == script.timing.worth_it
    script.answer(1, 4, stays=True)
    assert script.num_plans == 1
    assert script.last(PlanKept).cause == "paces changed"
    steps(script, workers, 60, all=2.0)
    assert script.count(ComputePlan) == asked + 1  # and that is that


def test_a_plan_that_is_much_better_takes_over_without_losing_a_step() -> None:
    script, workers = job(4)
    steps(script, workers, 30, all=2.0)
    script.answer(1, 4, predicted_s=5.0)
    assert script.last(GenerationPlanned).cause == "paces changed"
    assert script.state.current is not None  # it goes on until the other is formed
    script.prepare()
    script.open()
    script.form(step=30)
    steps(script, workers, 60, all=2.0)
    assert script.num_plans == 2


@pytest.mark.parametrize("num_vms", [2, 4])
def test_a_worker_that_is_slower_than_its_peers_is_told_to_the_planner(num_vms: int) -> None:
    script, workers = job(num_vms)
    slow = workers[-1]
    steps(script, workers, 30, **{slow.partition(".")[0]: 1.5})
    paced = script.last(WorkerPaced)
    assert (paced.worker, paced.slowdown) == (slow, 1.5)
    assert not script.count(Recalibrated)
    asked = script.last(ComputePlan)
    assert asked.reconsider
    assert {slot.worker: slot.slowdown for slot in asked.workers}[slow] == 1.5
    assert sum(slot.slowdown != 1.0 for slot in asked.workers) == 1


def test_a_slow_worker_recovers_and_is_not_judged_by_every_wobble() -> None:
    script, workers = job(4)
    vm = workers[-1].partition(".")[0]
    rng = random.Random(7)
    for _ in range(60):
        steps(script, workers, 2, **{vm: rng.uniform(1.35, 1.65)})
    assert [fact.slowdown for fact in concluded(script)] == [pytest.approx(1.5, rel=0.1)]
    steps(script, workers, 60, **{vm: 1.0})
    assert [fact.slowdown for fact in concluded(script)][1:] == [1.0]
    assert not script.state.slow


def test_a_slow_worker_that_no_plan_uses_is_tried_again_ever_more_seldom() -> None:
    script, workers = job(4)
    vm = workers[-1].partition(".")[0]
    waits: list[float] = []
    for _ in range(2):
        steps(script, workers, 40, **{vm: 2.0})
        script.answer(2, 1, predicted_s=1.0)  # without it
        script.prepare()
        script.open()
        script.form(step=40)
        found_at = script.last(WorkerPaced).at
        assert script.last(WorkerPaced).slowdown == 2.0
        while script.last(WorkerPaced).slowdown != 1.0:
            steps(script, workers, 1, step_s=7.0)
        waits.append(script.last(WorkerPaced).at - found_at)
        script.answer(2, 2, predicted_s=1.0)  # with it
        script.prepare()
        script.open()
        script.form(step=80)
    assert waits[0] == pytest.approx(1800.0, abs=10.0)
    assert waits[1] == pytest.approx(3600.0, abs=10.0)


def test_a_new_manager_begins_to_watch_anew_and_keeps_what_was_concluded() -> None:
    script, workers = job(4)
    steps(script, workers, 10, all=2.0)
    script.event(ManagerStarted(now=script.now))
    steps(script, workers, 10, all=2.0)
    assert not concluded(script)
    steps(script, workers, 10, all=2.0)
    assert script.count(Recalibrated) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10.0)), min_size=1, max_size=12))
def test_what_a_range_has_in_common_is_a_pace_of_its_workers(hosts: list[tuple[int, float]]) -> None:
    spans, paces = [(start, start + 1) for start, _ in hosts], [pace for _, pace in hosts]
    common = common_paces(spans, paces)
    for span, pace in zip(spans, common, strict=True):
        own = [p for s, p in zip(spans, paces, strict=True) if s == span]
        assert pace in own or (len(own) == 1 and pace in paces)
        if len(own) > 1:
            assert min(own) <= pace <= max(own)


def test_one_of_two_hosts_is_slow_rather_than_the_section() -> None:
    assert common_paces([(0, 1), (1, 2), (0, 1), (1, 2)], [1.0, 1.0, 1.0, 2.0]) == [1.0, 1.0, 1.0, 1.0]
    assert common_paces([(0, 1), (1, 2), (2, 3)], [1.0, 1.1, 3.0]) == [1.1, 1.1, 1.1]
