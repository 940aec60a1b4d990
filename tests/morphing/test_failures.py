"""Plans for failures to come, beside SlipStream's figures and exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest
from calibrations import uniform
from makara.morphing import Rerouted, failure_plans, least_bounds_s, reroute
from makara.pipeline import Hop, Path, Plan, Range, grid
from makara.simulator import Calibration, Link, simulate
from plans import stages


def random_case(seed: int) -> tuple[Plan, Calibration, int]:
    """(plan, calibration, failures): small enough to try every spread of the failures."""
    rng = random.Random(seed)
    depth, replicas = rng.randint(1, 4), rng.randint(1, 4)

    def times(most: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(1, most)) for _ in range(depth))

    calibration = uniform(
        depth,
        forward_s=times(4),
        backward_s=times(8),
        input_s=times(4),
        weight_s=times(4),
        inter_vm=Link(latency_s=rng.choice([0.0, 0.4]), bytes_per_s=rng.choice([1e18, 8.0])),
    )
    plan = grid(
        stages(depth),
        replicas,
        rng.randint(replicas, 12),
        window=rng.choice([None, 2 * depth, depth + 1]),
        halves=rng.random() < 0.5,
    )
    return plan, calibration, rng.randint(0, depth * (replicas - 1))


def without(plan: Plan, depth: int, failures: tuple[int, ...]) -> Plan:
    dead = [depth * pipeline + stage for stage, number in enumerate(failures) for pipeline in range(number)]
    found = reroute(plan, dead)
    assert isinstance(found, Rerouted)
    return found.plan


@pytest.mark.parametrize("seed", range(60))
def test_no_spread_of_the_failures_is_below_the_bound(seed: int) -> None:
    plan, calibration, most = random_case(seed)
    spans = sorted(set(plan.ranges), key=lambda span: span.start)
    replicas = plan.num_workers // len(spans)
    bound_s = least_bounds_s(plan, calibration, most)[most]
    for failures in itertools.product(range(replicas), repeat=len(spans)):
        if sum(failures) == most:
            step = simulate(without(plan, len(spans), failures), calibration, timeline=False)
            assert step.pipeline_s >= bound_s - 1e-9, f"seed {seed}, {failures}"


@pytest.mark.parametrize("seed", range(60))
def test_plans_are_monotone_and_complete_and_their_shares_are_even(seed: int) -> None:
    plan, calibration, most = random_case(seed)
    found = failure_plans(plan, calibration, most, simulated=random.Random(seed).randint(1, 4))
    assert len(found) == most + 1
    for number, one in enumerate(found):
        assert sum(one.failures) >= number
        assert one.pipeline_s >= one.bound_s - 1e-9, f"seed {seed}, {number} failures"
        assert one.pipeline_s == simulate(one.rerouted.plan, calibration).pipeline_s
        assert len(one.rerouted.survivors) == plan.num_workers - sum(one.failures)
        for failed, shares in zip(one.failures, one.shares().values(), strict=True):
            assert sum(shares) == plan.num_micro_batches
            if failed:  # no dealing gives the busiest less
                assert max(shares) == -(-plan.num_micro_batches // len(shares)), f"seed {seed}"
    for fewer, more in itertools.pairwise(found):
        assert fewer.pipeline_s <= more.pipeline_s
        assert fewer.bound_s <= more.bound_s


@pytest.mark.parametrize(("halves", "whole_s", "most_s"), [(False, 27.0, 36.0), (True, 21.0, 29.0)])
def test_slipstreams_pipelines_take_no_more_slots(halves: bool, whole_s: float, most_s: float) -> None:
    """Its figures 3 and 5: 3 pipelines of 4 stages, 6 micro-batches each, F = I = W = 1. It lets the third
    stage have the failure, which takes 36 slots, and 29; the plan may put it where it costs less."""
    plan = grid(stages(4), 3, 18, window=8, halves=halves)
    calibration = uniform(4, optimizer_s=(0.0,) * 4)
    none, one = failure_plans(plan, calibration, 1)
    assert none.pipeline_s == whole_s
    assert none.bound_s <= whole_s
    assert one.pipeline_s <= most_s
    assert simulate(without(plan, 4, (0, 0, 1, 0)), calibration).pipeline_s == (29.0 if halves else 33.0)


def test_whole_pipelines_that_fail_leave_a_plan_that_is_optimal() -> None:
    plan = grid(stages(4), 4, 48, window=8)
    found = failure_plans(plan, uniform(4, optimizer_s=(0.0,) * 4), 12, simulated=3)
    assert found[12].failures == (3, 3, 3, 3)
    assert found[12].gap == 0.0


def test_what_cannot_be_planned_is_named() -> None:
    plan = grid(stages(2), 2, 4)
    with pytest.raises(ValueError, match="most: 3 failures leave a stage without a worker"):
        failure_plans(plan, uniform(2), 3)
    with pytest.raises(ValueError, match="simulated: 0"):
        failure_plans(plan, uniform(2), 1, simulated=0)
    hops = (Hop(1, Range(0, 1)), Hop(2, Range(1, 2)))
    ranges = (Range(0, 2), Range(0, 1), Range(1, 2))
    overlapping = Plan(2, 4, ranges, (Path(hops, (0, 1, 2, 3)),))
    with pytest.raises(ValueError, match="plan: its workers' ranges are not stages"):
        failure_plans(overlapping, uniform(2), 1)
