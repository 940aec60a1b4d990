"""Plans for failures to come (SlipStream §4.2): for each number of them, what the survivors do.

Which worker of a stage fails does not matter: two that host the same range may swap places. So a plan is
made for numbers of failures by stage (§4.2.1). Two ways to spread them are simulated: so that the lower
bound is least, and so that all stages keep as many survivors. The other failures take the plan of the next
number that was simulated: what runs without more workers runs with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..pipeline import Plan, Range
from ..simulator import Calibration, simulate
from .bounds import Bound
from .request import Infeasible
from .reroute import Rerouted, reroute
from .stages import Mode, stage_table

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FailurePlan:
    """What is done after a number of failures. Times in seconds, by simulation but for the bound."""

    failures: tuple[int, ...]
    """By stage: workers that the plan does without. In sum as many as failed, or more: the rest idle."""
    rerouted: Rerouted
    step_s: float
    pipeline_s: float
    """Until the last backward has ended."""
    bound_s: float
    """No plan without so many workers has a shorter `pipeline_s`, wherever they fail (`least_bounds_s`)."""

    @property
    def gap(self) -> float:
        """How far from optimal the order may be, as a part of the bound."""
        return self.pipeline_s / self.bound_s - 1.0

    def shares(self) -> dict[Range, tuple[int, ...]]:
        """{range of a stage: micro-batches of each survivor in rank order}."""
        plan = self.rerouted.plan
        taken = [0] * plan.num_workers
        for path in plan.paths:
            for hop in path.hops:
                taken[hop.worker] += len(path.micro_batches)
        return {
            span: tuple(taken[rank] for rank in ranks) for span, ranks in zip(*_stages(plan), strict=True)
        }


def failure_plans(
    plan: Plan, calibration: Calibration, most: int, *, simulated: int = 8
) -> tuple[FailurePlan, ...]:
    """For 0, 1, ... `most` failures, the plan of the survivors; `pipeline_s` never falls with them.

    `simulated`: how many numbers of failures are simulated, evenly spaced; for the others the bound is their
    own. Raises `ValueError` where the plan's ranges are not stages, or a stage would have no survivor.
    """
    spans, ranks = _stages(plan)
    if simulated < 1:
        raise ValueError(f"simulated: {simulated} is not a number >= 1")
    if not 0 <= most <= plan.num_workers - len(spans):
        raise ValueError(f"most: {most} failures leave a stage without a worker, or are negative")
    bounds_s = least_bounds_s(plan, calibration, most)
    orders = [_order(ranks, most, key) for key in (_cost(plan, calibration), _no_cost)]
    apart = max(1, -(-most // simulated))
    found: list[FailurePlan] = []
    for number in range(most, -1, -1):
        tried = found[-1:]
        if (most - number) % apart == 0 or number == 0:
            for order in orders[: number or 1]:
                tried.append(_simulated(plan, calibration, ranks, order[:number], bounds_s[number]))
        best = min(tried, key=lambda one: (one.pipeline_s, one.step_s))
        found.append(replace(best, bound_s=bounds_s[number]))
    return tuple(reversed(found))


def least_bounds_s(plan: Plan, calibration: Calibration, most: int) -> tuple[float, ...]:
    """For 0, 1, ... `most` failures, seconds until the last backward that no plan of the survivors is below.

    Of each stage, some survivor has at least its number of micro-batches divided by its survivors, rounded
    up. It begins when the first has come through the stages before it, does them all, and its last gradient
    passes back through those stages (`Bound.stage_ns`). The bound is the highest of all stages, with the
    failures spread such that it is least: one after the other, each where it then is lowest. That is exact,
    as a stage's time only rises with its failures.
    """
    _, ranks = _stages(plan)
    cost = _cost(plan, calibration)
    highest = max(cost(stage, len(one)) for stage, one in enumerate(ranks))
    found = [highest]
    survivors = [*map(len, ranks)]
    for stage in _order(ranks, most, cost):
        survivors[stage] -= 1
        highest = max(highest, cost(stage, survivors[stage]))
        found.append(highest)
    return tuple(bound_ns / _NS_PER_S for bound_ns in found)


def _simulated(
    plan: Plan,
    calibration: Calibration,
    ranks: Sequence[Sequence[int]],
    failed: Sequence[int],
    bound_s: float,
) -> FailurePlan:
    """`failed`: the stages of the failures. Those of a stage are of its first workers, so that where all
    stages have as many, whole pipelines are gone and no path crosses."""
    failures = tuple(map(failed.count, range(len(ranks))))
    dead = [rank for one, number in zip(ranks, failures, strict=True) for rank in one[:number]]
    found = reroute(plan, dead) if dead else Rerouted(plan, tuple(range(plan.num_workers)))
    assert not isinstance(found, Infeasible), "each stage has a survivor"
    step = simulate(found.plan, calibration, timeline=False)
    return FailurePlan(failures, found, step.time_s, step.pipeline_s, bound_s)


_Cost = Callable[[int, int], int]
"""(stage, its survivors) to the nanoseconds that a step then takes at least."""


def _no_cost(_stage: int, _survivors: int) -> int:
    return 0


def _cost(plan: Plan, calibration: Calibration) -> _Cost:
    spans, _ = _stages(plan)
    table = stage_table(calibration, plan.schedule)
    window = None if any(path.window for path in plan.paths) else plan.window
    bound = Bound(table, spans, Mode(plan.recompute, plan.has_halves), window=window)
    carried = sum(len(path.micro_batches) for path in plan.paths)
    return lambda stage, survivors: bound.stage_ns(stage, -(-carried // survivors))


def _order(ranks: Sequence[Sequence[int]], most: int, cost: _Cost) -> list[int]:
    """The stages of the failures, one after the other, each where `cost` is then least. Of those that cost no
    more than what is already paid, the one with the most survivors, then the first: later ones fill last."""
    survivors = [len(one) for one in ranks]
    paid = max(map(cost, range(len(ranks)), survivors))
    found: list[int] = []
    for _ in range(most):
        stage = min(
            (stage for stage, number in enumerate(survivors) if number > 1),
            key=lambda stage: (max(paid, cost(stage, survivors[stage] - 1)), -survivors[stage], stage),
        )
        survivors[stage] -= 1
        paid = max(paid, cost(stage, survivors[stage]))
        found.append(stage)
    return found


def _stages(plan: Plan) -> tuple[tuple[Range, ...], tuple[tuple[int, ...], ...]]:
    """The plan's stages in order, and the ranks of each."""
    spans = tuple(sorted(set(plan.ranges), key=lambda span: span.start))
    if [span.start for span in spans] != [0, *(span.stop for span in spans[:-1])]:
        raise ValueError("plan: its workers' ranges are not stages, as some overlap")
    return spans, tuple(
        tuple(rank for rank, hosted in enumerate(plan.ranges) if hosted == span) for span in spans
    )
