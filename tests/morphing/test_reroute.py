"""Rerouting: the dead workers' micro-batches cross to peers, and every survivor keeps its range."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from calibrations import uniform
from hypothesis import given
from hypothesis import strategies as st
from makara.morphing import Before, Choice, Infeasible, Request, Rerouted, Slot, loading_s, reroute, rerouted
from makara.pipeline import Hop, Path, Plan, Range, grid
from makara.pipeline.plan import shape_of
from makara.simulator import Link, simulate
from plans import World, crossing_plans, grids, stages


def without(plan: Plan, *dead: int) -> Plan:
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


def slots(pipeline: int, *, halves: bool) -> list[float]:
    """What a step takes if a worker of each stage in turn is dead: 3 pipelines of 4 stages, 6 micro-batches
    each, F = I = W = 1."""
    plan = grid(stages(4), 3, 18, window=8, halves=halves)
    calibration = uniform(4, optimizer_s=(0.0,) * 4)
    return [simulate(without(plan, 4 * pipeline + dead), calibration).pipeline_s for dead in range(4)]


@pytest.mark.parametrize("pipeline", range(3))
def test_a_dead_worker_costs_no_more_than_in_slipstream(pipeline: int) -> None:
    """Its figures 3 and 5 have one of stage 2 dead: 36 slots, and 29."""
    assert slots(pipeline, halves=False)[2] <= 36
    assert slots(pipeline, halves=True)[2] == 29


def test_each_stage_has_its_slots() -> None:
    """Two peers of a dead worker have 9 micro-batches each: 27 slots, and what fills and drains them."""
    assert [slots(pipeline, halves=False) for pipeline in range(3)] == [
        [29, 31, 33, 36],
        [30, 30, 34, 36],
        [30, 31, 33, 36],
    ]
    assert [slots(pipeline, halves=True) for pipeline in range(3)] == [[27, 28, 29, 30]] * 3


def test_slots_do_not_hang_on_what_arrives_at_the_very_same_time() -> None:
    """Found: 38 slots with stage 0 dead, and 30 where each operation was late by a little. The last forward
    waited for all backwards, as the next one always came in time."""
    calibration = uniform(4, optimizer_s=(0.0,) * 4)
    late = replace(calibration, operation_s=0.005, message_s=0.005)
    for halves in (False, True):
        plan = grid(stages(4), 3, 18, window=8, halves=halves)
        for dead in range(4):
            exact, found = (simulate(without(plan, 4 + dead), times) for times in (calibration, late))
            assert exact.pipeline_s == pytest.approx(found.pipeline_s, rel=0.05)


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
    assert [without(whole, *dead).shape for dead in ([2], [2, 6], [2, 5], [0, 1, 2, 3])] == [
        "4x3-1",
        "4x3-2",
        "4x3-2",
        "4x2",
    ]
    assert shape_of(without(whole, 2).to_json()) == "4x3-1"


def test_a_whole_dead_pipeline_is_shared_among_the_others() -> None:
    plan = without(grid(stages(2), 3, 12), 0, 1)
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
    assert without(Plan(4, 4, ranges, paths), 0).paths == (
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


def request(before: Plan, *dead: int, memory_bytes: int = 1 << 20) -> tuple[Request, Before]:
    """A question for the workers of `before` but those that are dead."""
    workers = [f"w{rank}" for rank in range(before.num_workers)]
    alive = [rank for rank in range(before.num_workers) if rank not in dead]
    asked = Request(
        calibration=uniform(before.num_sections, activation_bytes=(1000,) * before.num_sections),
        num_sections=before.num_sections,
        num_micro_batches=before.num_micro_batches,
        workers=[Slot(workers[rank], f"vm{rank}", memory_bytes) for rank in alive],
        generation=7,
        holding={workers[rank]: before.ranges[rank] for rank in alive},
    )
    return asked, Before(before, workers)


def test_a_rerouted_plan_is_predicted_and_described_like_any_other() -> None:
    found = rerouted(*request(grid(stages(4), 3, 18, generation=6), 2))
    assert isinstance(found, Choice)
    assert (found.plan.shape, found.plan.generation) == ("4x3-1", 7)
    assert found.workers == tuple(f"w{rank}" for rank in range(12) if rank != 2)
    row = found.candidate
    assert (row.pipeline_parallel_degree, row.data_parallel_degree, row.used) == (4, 3, 11)
    assert row.predicted_s == found.predicted_s
    assert row.peak_bytes is not None


def test_nothing_is_rerouted_around_those_who_live() -> None:
    assert rerouted(*request(grid(stages(2), 2, 8))) is None


def test_a_rerouted_plan_that_needs_too_much_memory_gets_a_narrower_window_or_none() -> None:
    plan = grid(stages(2), 2, 40)
    wide = rerouted(*request(plan, 1))
    assert isinstance(wide, Choice)
    assert wide.candidate.peak_bytes is not None
    narrow = rerouted(*request(plan, 1, memory_bytes=wide.candidate.peak_bytes - 1))
    assert isinstance(narrow, Choice)
    assert narrow.plan.window is not None
    assert narrow.plan.window < 40
    none = rerouted(*request(plan, 1, memory_bytes=1000))
    assert isinstance(none, Infeasible)
    assert "2x2-1" in none.reason


@pytest.mark.parametrize("capacity", [250, 270, 290, 310])
def test_a_rerouted_plan_fits_into_memory_though_a_worker_is_late(capacity: int) -> None:
    """Found: a reroute that fitted while nobody was late took a fifth more where somebody was."""
    plan = grid(stages(8), 2, 32)
    asked, before = request(plan, 9, memory_bytes=capacity)
    asked = replace(asked, calibration=uniform(8, cut_bytes=(1,) * 7, grad_cut_bytes=(1,) * 7))
    found = rerouted(asked, before)
    assert isinstance(found, Choice)
    vms = [f"vm{number}" for number in range(found.plan.num_workers)]
    for late in range(found.plan.num_workers):
        slowdown = [1.0 + (rank == late) for rank in range(found.plan.num_workers)]
        step = simulate(found.plan, asked.calibration, vm_of=vms, slowdown=slowdown, timeline=False)
        assert max(step.peak_bytes) <= capacity


def test_only_what_a_worker_lacks_is_loaded() -> None:
    link = Link(latency_s=1.0, bytes_per_s=10.0)
    calibration = uniform(4, inter_vm=link)  # 50 bytes of each section, without gradient sums
    plan = grid([Range(0, 2), Range(2, 4)], 1, 4)
    assert loading_s(plan.ranges, ["a", "b"], calibration, {"a": Range(0, 2), "b": Range(1, 4)}) == 0
    assert loading_s(plan.ranges, ["a", "b"], calibration, {"a": Range(0, 3), "b": Range(0, 3)}) == 6
    assert loading_s(plan.ranges, ["a", "b"], calibration, {"b": Range(2, 4)}) == 11


def test_whoever_sends_most_is_waited_for() -> None:
    calibration = uniform(4, inter_vm=Link(latency_s=1.0, bytes_per_s=10.0))
    one, three = ["a", "b", "c", "d"], {"b": Range(0, 2), "c": Range(0, 2), "d": Range(0, 2)}
    spans = grid([Range(0, 2)], 4, 4).ranges
    assert loading_s(spans, one, calibration, {"a": Range(0, 4)}) == 1 + 30  # two sections to three workers
    assert loading_s(spans, one, calibration, {"e": Range(0, 4), **three}) == 1 + 10  # from those of the plan
