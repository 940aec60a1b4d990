"""Rerouting: the dead workers' micro-batches cross to peers, and every survivor keeps its range."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from calibrations import uniform
from hypothesis import given
from hypothesis import strategies as st
from makara.morphing import Infeasible, Rerouted, reroute
from makara.pipeline import Hop, Path, Plan, Range, grid
from makara.pipeline.plan import shape_of
from makara.simulator import simulate
from plans import World, crossing_plans, grids, stages


def rerouted(plan: Plan, *dead: int) -> Plan:
    found = reroute(plan, dead)
    assert isinstance(found, Rerouted)
    return found.plan


def loads(plan: Plan) -> list[Counter[int]]:
    """For each section, {worker: its micro-batches}, with 0 for hosts that run none."""
    found = [Counter(dict.fromkeys(plan.hosts(section), 0)) for section in range(plan.num_sections)]
    for path in plan.paths:
        for hop in path.hops:
            for section in hop.range.sections:
                found[section][hop.worker] += len(path.micro_batches)
    return found


@pytest.mark.parametrize("pipeline", range(3))
def test_a_dead_worker_costs_the_slots_of_slipstream(pipeline: int) -> None:
    """SlipStream (figures 3 and 5): 3 pipelines of 4 stages, 6 micro-batches each, one of stage 2 dead."""
    calibration = uniform(4, optimizer_s=(0.0,) * 4)
    for halves, slots in ((False, 36), (True, 29)):
        plan = grid(stages(4), 3, 18, window=8, halves=halves)
        assert simulate(rerouted(plan, 4 * pipeline + 2), calibration).pipeline_s == slots


def test_each_stage_has_its_slots() -> None:
    calibration = uniform(4)
    took = {
        halves: [
            simulate(
                rerouted(grid(stages(4), 3, 18, window=8, halves=halves), 4 + dead), calibration
            ).pipeline_s
            for dead in range(4)
        ]
        for halves in (False, True)
    }
    assert took == {False: [38, 36, 36, 36], True: [27, 28, 29, 30]}


def test_peers_take_turns_and_the_path_returns() -> None:
    found = reroute(grid(stages(3), 3, 6), [4])
    assert isinstance(found, Rerouted)
    assert found.survivors == (0, 1, 2, 3, 5, 6, 7, 8)
    assert [[hop.worker for hop in path.hops] for path in found.plan.paths] == [
        [0, 1, 2],
        [3, 1, 4],
        [3, 6, 4],
        [5, 6, 7],
    ]
    assert [path.micro_batches for path in found.plan.paths] == [(0, 3), (1,), (4,), (2, 5)]


def test_the_shape_tells_how_many_workers_are_missing() -> None:
    whole = grid(stages(4), 3, 18)
    assert [rerouted(whole, *dead).shape for dead in ([2], [2, 6], [2, 5], [0, 1, 2, 3])] == [
        "4x3-1",
        "4x3-2",
        "4x3-2",
        "4x2",
    ]
    assert shape_of(rerouted(whole, 2).to_json()) == "4x3-1"


def test_a_whole_dead_pipeline_is_shared_among_the_others() -> None:
    plan = rerouted(grid(stages(2), 3, 12), 0, 1)
    assert plan.paths == (
        Path((Hop(0, Range(0, 1)), Hop(1, Range(1, 2))), (0, 1, 4, 6, 7, 10)),
        Path((Hop(2, Range(0, 1)), Hop(3, Range(1, 2))), (2, 3, 5, 8, 9, 11)),
    )


def test_a_slow_peer_takes_less() -> None:
    plan = grid(stages(1), 3, 24, shares=[10, 10, 4])
    found = reroute(plan, [0], slowdown=[1.0, 1.0, 2.5])
    assert isinstance(found, Rerouted)
    assert dict(loads(found.plan)[0]) == {0: 17, 1: 7}  # which take 17 and 17.5


def test_a_range_that_no_peer_hosts_alone_is_run_in_parts() -> None:
    ranges = (Range(0, 4), Range(0, 2), Range(2, 4))
    paths = (Path((Hop(0, ranges[0]),), (0, 2)), Path((Hop(1, ranges[1]), Hop(2, ranges[2])), (1, 3)))
    assert rerouted(Plan(4, 4, ranges, paths), 0).paths == (
        Path((Hop(0, Range(0, 2)), Hop(1, Range(2, 4))), (0, 1, 2, 3)),
    )


def test_a_section_without_a_host_is_named() -> None:
    whole = grid([Range(0, 2), Range(2, 3), Range(3, 5)], 2, 8)
    assert reroute(whole, [1, 4, 5]) == Infeasible(
        "nobody who lives hosts section 2, so no peer can take its micro-batches"
    )
    found = reroute(whole, [0, 3, 2, 5])
    assert isinstance(found, Infeasible)
    assert "sections 0..1 and 3..4" in found.reason
    assert isinstance(reroute(whole, range(6)), Infeasible)


@given(grids() | crossing_plans(), st.randoms(use_true_random=False))
def test_histories_of_deaths(plan: Plan, draw: random.Random) -> None:
    """After each death every micro-batch passes every section once (`Plan` checks that), no range changes,
    and the work can be done; where it cannot, a section has lost its last host."""
    now, ranks = plan, list(range(plan.num_workers))
    while True:
        dead = draw.sample(range(now.num_workers), draw.randint(1, min(2, now.num_workers)))
        found = reroute(now, dead)
        left = [rank for place, rank in enumerate(ranks) if place not in dead]
        hosted = {section for rank in left for section in plan.ranges[rank].sections}
        if isinstance(found, Infeasible):
            assert len(hosted) < plan.num_sections
            return
        now, ranks = found.plan, [ranks[survivor] for survivor in found.survivors]
        assert ranks == left
        assert now.ranges == tuple(plan.ranges[rank] for rank in ranks)
        assert replace(now, ranges=plan.ranges, paths=plan.paths) == plan
        world = World(now, draw)
        world.play()
        assert all(not dispatcher.remaining for dispatcher in world.dispatchers)


@given(grids(max_micro_batches=30), st.randoms(use_true_random=False))
def test_deaths_one_by_one_cost_no_more_than_at_once(plan: Plan, draw: random.Random) -> None:
    order = draw.sample(range(plan.num_workers), plan.num_workers)
    now, ranks = plan, list(range(plan.num_workers))
    for number, dead in enumerate(order, start=1):
        found = reroute(now, [ranks.index(dead)])
        at_once = reroute(plan, order[:number])
        if isinstance(found, Infeasible):
            assert isinstance(at_once, Infeasible)
            return
        assert isinstance(at_once, Rerouted)
        now = found.plan
        ranks.remove(dead)
        for plan_of in (now, at_once.plan):
            for counts in loads(plan_of):
                assert max(counts.values()) - min(counts.values()) <= 1
