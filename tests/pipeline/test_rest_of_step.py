"""The rest of a step runs each contribution that is missing once, and no more of the others than it must."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from makara.pipeline import Range, grid, orders
from makara.pipeline.contributions import Pairs
from makara.pipeline.dispatcher import check_order
from makara.pipeline.operations import Kind
from makara.pipeline.plan import InvalidPlan, Path, Plan, RestOfStep
from makara.pipeline.rest_of_step import rest_of_step

NUM_SECTIONS = 6


def _missing(chance: random.Random, num_micro_batches: int) -> dict[tuple[int, ...], Pairs]:
    buckets = [(section,) for section in range(NUM_SECTIONS)] + [(0, NUM_SECTIONS - 1)]
    bits = [0, (1 << num_micro_batches) - 1, chance.getrandbits(num_micro_batches)]
    return {bucket: Pairs(bucket, tuple(chance.choice(bits) for _ in bucket)) for bucket in buckets}


def _added(plan: Plan) -> set[tuple[int, int]]:
    return {
        (micro_batch, section)
        for path in plan.paths
        for micro_batch in path.micro_batches
        for section in filter(path.adds, range(plan.num_sections))
    }


@pytest.mark.parametrize("seed", range(200))
def test_each_missing_contribution_is_run_once_and_nothing_below_it_gets_a_gradient(seed: int) -> None:
    chance = random.Random(seed)
    num_micro_batches = chance.randint(3, 12)
    cut = chance.randint(1, NUM_SECTIONS - 1)
    plan = grid([Range(0, cut), Range(cut, NUM_SECTIONS)], chance.randint(1, 3), num_micro_batches)
    plan = replace(plan, halves=chance.random() < 0.5, window=chance.choice([None, 1, 4]))
    missing = _missing(chance, num_micro_batches)
    unknown = {m for m in range(num_micro_batches) if chance.random() < 0.2}
    rest = rest_of_step(plan, missing, unknown, [1] * NUM_SECTIONS)
    wanted = {pair for pairs in missing.values() for pair in pairs}
    assert _added(rest) == wanted
    carried = [m for path in rest.paths for m in path.micro_batches]
    assert sorted(carried) == sorted({m for m, _ in wanted} | unknown)
    for path in rest.paths:
        assert path.hops in [whole.hops for whole in plan.paths]
        for micro_batch in path.micro_batches:
            opened = [section for m, section in wanted if m == micro_batch]
            assert path.open_from == min(opened, default=NUM_SECTIONS)
    for worker, order in enumerate(orders(rest)):
        check_order(rest, worker, order)
        for task in order:
            path = rest.path_of(task.micro_batch)
            if task.kind in (Kind.INPUT, Kind.RECOMPUTE):
                assert path.hops[task.stage].range.stop > path.open_from


def test_micro_batches_are_dealt_by_the_work_that_is_left() -> None:
    plan = grid([Range(0, NUM_SECTIONS)], 2, 6)
    # Two lack everything, four only the last section: 18 each and 8 each.
    few, all_six = 0b000011, 0b111111
    missing = {(k,): Pairs((k,), (all_six if k == NUM_SECTIONS - 1 else few,)) for k in range(NUM_SECTIONS)}
    rest = rest_of_step(plan, missing, (), [1] * NUM_SECTIONS)
    for hops in {path.hops for path in plan.paths}:
        dealt = [(path.open_from, len(path.micro_batches)) for path in rest.paths if path.hops == hops]
        assert sorted(dealt) == [(0, 1), (NUM_SECTIONS - 1, 2)]


def test_a_step_of_which_all_is_held_needs_no_operation() -> None:
    plan = grid([Range(0, 3), Range(3, NUM_SECTIONS)], 2, 4)
    rest = rest_of_step(plan, {(k,): Pairs.none((k,)) for k in range(NUM_SECTIONS)}, (), [1] * NUM_SECTIONS)
    assert rest.paths == ()
    assert orders(rest) == ((),) * 4


def test_only_the_rest_of_a_step_leaves_contributions_out() -> None:
    whole = grid([Range(0, NUM_SECTIONS)], 1, 2)
    cut = (Path(whole.paths[0].hops, (0, 1), open_from=2),)
    with pytest.raises(InvalidPlan, match="only the rest of a step"):
        replace(whole, paths=cut)
    values = dict(num_sections=NUM_SECTIONS, num_micro_batches=2, ranges=whole.ranges)
    assert RestOfStep(**values, paths=cut).path_of(1).open_from == 2  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match="twice"):
        RestOfStep(**values, paths=(*cut, *whole.paths))  # type: ignore[arg-type]
