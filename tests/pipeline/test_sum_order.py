"""The order of sums: the same for all, in rounds that can run at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from makara.pipeline import Path, Plan, Range, grid
from makara.pipeline.plan import Hop
from makara.pipeline.sum_order import sum_order
from plans import crossing_plans, grids


def duration(plan: Plan, order: Iterable[int]) -> int:
    """Of sums that take one second each, issued in this order by all."""
    free = [0] * plan.num_workers
    for section in order:
        hosts = plan.hosts(section)
        over = 1 + max(free[host] for host in hosts)
        for host in hosts:
            free[host] = over
    return max(free)


@given(grids() | crossing_plans())
def test_each_section_is_summed_once_and_no_later_than_in_descending_order(plan: Plan) -> None:
    order = sum_order(plan)
    assert sorted(order) == list(range(plan.num_sections))
    assert duration(plan, order) <= duration(plan, reversed(range(plan.num_sections)))


@given(grids())
def test_on_a_worker_of_a_grid_sections_descend(plan: Plan) -> None:
    for span in plan.ranges:
        own = [section for section in sum_order(plan) if section in span]
        assert own == sorted(own, reverse=True)


def test_stages_of_a_grid_take_turns() -> None:
    assert sum_order(grid([Range(0, 2), Range(2, 5)], 1, 1)) == [4, 1, 3, 0, 2]


def test_pipelines_of_other_cuts_need_few_rounds() -> None:
    """Eight sections in four stages, and in three: in descending order sums wait for each other."""
    pipelines = [[2, 2, 2, 2], [3, 3, 2]]
    ranges, paths = list[Range](), list[Path]()
    for number, sizes in enumerate(pipelines):
        spans = [Range(*pair) for pair in itertools.pairwise(itertools.accumulate([0, *sizes]))]
        hops = tuple(Hop(len(ranges) + place, span) for place, span in enumerate(spans))
        ranges += spans
        paths.append(Path(hops, (number,)))
    plan = Plan(8, 2, tuple(ranges), tuple(paths))
    assert duration(plan, sum_order(plan)) == 3
    assert duration(plan, reversed(range(8))) == 6
