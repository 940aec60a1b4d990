"""Plans: what makes one valid, the grid's dealing of micro-batches, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makara.pipeline import Hop, InvalidPlan, Kind, Operation, Path, Plan, Range, components, grid
from plans import crossing_plans, grids, stages


@given(crossing_plans() | grids())
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_a_grid_deals_every_micro_batch_once_and_evenly(depth: int, replicas: int, extra: int) -> None:
    plan = grid(stages(depth), replicas, replicas + extra)
    counts = [len(path.micro_batches) for path in plan.paths]
    assert sum(counts) == replicas + extra
    assert max(counts) - min(counts) <= 1
    assert plan.shape == f"{depth}x{replicas}"
    assert plan.num_workers == depth * replicas


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_grid_deals_the_shares_that_it_is_told(shares: list[int]) -> None:
    plan = grid(stages(2), len(shares), sum(shares), shares=shares)
    assert [len(path.micro_batches) for path in plan.paths] == shares
    even = grid(stages(2), len(shares), sum(shares))
    assert (
        grid(stages(2), len(shares), sum(shares), shares=[len(p.micro_batches) for p in even.paths]) == even
    )


@pytest.mark.parametrize("shares", [(3, 1), (1, 1, 1), (3, 0)])
def test_shares_that_are_not_of_all_micro_batches_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPlan, match="shares: expected 2"):
        grid(stages(2), 2, 3, shares=shares)


def test_more_replicas_than_micro_batches_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="replicas: 3"):
        grid(stages(2), 3, 2)


def two_stages(**change: Any) -> dict[str, Any]:
    first, second = Range(0, 2), Range(2, 3)
    values: dict[str, Any] = {
        "num_sections": 3,
        "num_micro_batches": 2,
        "ranges": (first, second),
        "paths": (Path((Hop(0, first), Hop(1, second)), (0, 1)),),
    }
    return values | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": (Path((Hop(0, Range(0, 2)),), (0, 1)),)}, "ends before section 2"),
        ({"paths": (Path((Hop(1, Range(2, 3)),), (0, 1)),)}, "section 0 is run by no hop or by two"),
        ({"paths": (Path((Hop(0, Range(0, 2)), Hop(2, Range(2, 3))), (0, 1)),)}, "worker 2 is not in"),
        ({"paths": (Path((Hop(0, Range(0, 2)), Hop(0, Range(2, 3))), (0, 1)),)}, "worker 0 does not host"),
        ({"num_micro_batches": 3}, "each of the 3 micro-batches exactly once"),
        ({"paths": (Path((Hop(0, Range(0, 2)), Hop(1, Range(2, 3))), (1, 0)),)}, "must ascend"),
        ({"ranges": (Range(0, 2), Range(2, 4))}, "passes K=3"),
        ({"window": 0}, "window: 0"),
        ({"ranges": ()}, "at least one"),
    ],
)
def test_a_plan_that_breaks_a_rule_says_which(change: dict[str, Any], message: str) -> None:
    Plan(**two_stages())
    with pytest.raises(InvalidPlan, match=message):
        Plan(**two_stages(**change))


def test_malformed_json_is_named() -> None:
    whole = Plan(**two_stages()).to_json()
    with pytest.raises(InvalidPlan, match="paths"):
        Plan.from_json({name: value for name, value in whole.items() if name != "paths"})
    with pytest.raises(InvalidPlan, match="best"):
        Plan.from_json(whole | {"schedule": "best"})


def test_ranges_refuse_to_be_empty_and_know_their_sections() -> None:
    with pytest.raises(InvalidPlan, match=r"range 2\.\.2"):
        Range(2, 2)
    assert list(Range(1, 4).sections) == [1, 2, 3]
    assert 3 in Range(1, 4)
    assert 4 not in Range(1, 4)


def test_hosts_are_all_workers_whose_range_holds_the_section() -> None:
    plan = grid([Range(0, 2), Range(2, 3)], 2, 4)
    assert plan.hosts(1) == (0, 2)
    assert plan.hosts(2) == (1, 3)


def test_operations_are_written_as_pytorch_writes_them() -> None:
    assert str(Operation(2, Kind.FORWARD, 5)) == "2F5"
    assert str(Operation(12, Kind.RECOMPUTE, 3)) == "12R3"


@given(crossing_plans() | grids())
def test_components_part_the_paths_and_share_no_worker(plan: Plan) -> None:
    parts = components(plan)
    workers = [worker for part in parts for worker in part.workers]
    assert len(workers) == len(set(workers))
    carried = sorted(m for part in parts for path in part.paths for m in path.micro_batches)
    assert carried == list(range(plan.num_micro_batches))


def test_the_replicas_of_a_grid_are_alike() -> None:
    parts = components(grid(stages(3), 3, 7))
    assert [part.signature == parts[1].signature for part in parts] == [False, True, True]
    assert replace(parts[1], paths=parts[1].paths * 2).signature is None
