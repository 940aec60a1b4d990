"""Paths with windows of their own, as pipelines of different depth have."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from calibrations import uniform
from makara.morphing import Rerouted, TemplateStage, plan_of, reroute
from makara.pipeline import InvalidPlan, Kind, Plan, Range, grid
from makara.pipeline.schedules import orders
from makara.simulator import simulate
from plans import World


def two_pipelines(*windows: int | None) -> Plan:
    """Of three stages and of two, over six sections and twelve micro-batches."""
    stages = [
        [TemplateStage(Range(start, start + size), 1) for start in range(0, 6, size)] for size in (2, 3)
    ]
    return plan_of(stages, (6, 6), windows=windows)


def most_in_flight(plan: Plan, seed: int) -> list[int]:
    """On each worker, in a step of random delays."""
    world = World(plan, random.Random(seed))
    world.play()
    found: list[int] = []
    for ran in world.ran:
        now = most = 0
        for operation in ran:
            now += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(operation.kind, 0)
            most = max(most, now)
        found.append(most)
        assert now == 0
    return found


@pytest.mark.parametrize("windows", [(1, 3), (4, 2), (None, 2), (3, 3)])
def test_each_pipeline_keeps_to_its_window(windows: tuple[int | None, ...]) -> None:
    plan = two_pipelines(*windows)
    limits = [windows[0] or 6] * 3 + [windows[1] or 6] * 2
    assert [plan.window_of(worker) or 6 for worker in range(5)] == limits
    for seed in range(20):
        found = most_in_flight(plan, seed)
        assert all(most <= limit for most, limit in zip(found, limits, strict=True))
        assert max(found[:3]) == limits[0], "the wider one is used"


def test_the_order_of_a_pipeline_is_not_that_of_one_with_another_window() -> None:
    pair = [TemplateStage(Range(0, 3), 1), TemplateStage(Range(3, 6), 1)]
    plan = plan_of([pair, pair], (12, 12), windows=(12, 2))
    assert orders(plan)[2] == orders(plan, {2})[2]
    assert orders(plan)[0] == orders(plan, {0})[0]


def test_a_wider_window_of_one_pipeline_makes_the_step_shorter() -> None:
    calibration = uniform(6)
    both_narrow = simulate(two_pipelines(1, 1), calibration, timeline=False)
    one_wide = simulate(two_pipelines(6, 1), calibration, timeline=False)
    assert one_wide.peak_bytes[0] > both_narrow.peak_bytes[0]
    assert one_wide.peak_bytes[3:] == both_narrow.peak_bytes[3:]
    assert one_wide.busy_s == both_narrow.busy_s
    assert one_wide.pipeline_s == both_narrow.pipeline_s, "the other pipeline is the slower one"
    assert simulate(two_pipelines(6, 6), calibration, timeline=False).pipeline_s < one_wide.pipeline_s


def test_windows_outlive_json_and_plans_without_any_are_written_as_before() -> None:
    plan = two_pipelines(5, 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.window == 2
    assert all("window" not in path for path in two_pipelines(None, None).to_json()["paths"])
    assert all("window" not in path for path in grid([Range(0, 6)], 2, 4, window=1).to_json()["paths"])


def test_paths_of_one_worker_have_one_window() -> None:
    plan = two_pipelines(5, 2)
    crossing = replace(plan.paths[0], window=4, micro_batches=())
    with pytest.raises(InvalidPlan, match="path 2: its window is not that of the other paths"):
        replace(plan, paths=(*plan.paths, crossing))
    with pytest.raises(InvalidPlan, match="window: 0 is not a positive number"):
        replace(plan, paths=(replace(plan.paths[0], window=0), plan.paths[1]))


def test_a_rerouted_plan_keeps_to_the_tightest_window() -> None:
    """Its paths cross from one pipeline to the other."""
    found = reroute(two_pipelines(5, 2), [0])
    assert isinstance(found, Rerouted)
    assert [found.plan.window_of(worker) for worker in range(4)] == [2] * 4
    for seed in range(20):
        assert max(most_in_flight(found.plan, seed)) <= 2
