"""What a replay says of the same window: the same market, policy, calibration and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from makara.manager.replay import Outcome, Policy, Scenario, replay
from makara.manager.replay.planner import CachedPlanner
from makara.simulator import Calibration, MorphCosts, TraceEvent

from .job import BATCH, FIXED_DEPTH, spec_of
from .market import NODES, Spot

_AMPLE_S = 3600.0  # by then a job has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a replay has in the window."""

    window_s: float
    steps: int
    seconds: Mapping[str, float]
    """Of the window, by what it went into (`manager.replay.time_account.Item`)."""
    lost_steps: int
    shapes: tuple[str, ...]

    @property
    def goodput(self) -> float:
        return self.seconds["useful"] / self.window_s


def predicted(
    policy: Policy, spot: Spot, calibration: Calibration, costs: MorphCosts, window_s: float
) -> Predicted:
    """The window begins, as the real one does, when the first step on all of the first nodes is done: it is
    the difference between a replay to its end and one to its beginning."""
    planner = CachedPlanner()

    def until(events: list[TraceEvent], seconds: float) -> Outcome:
        scenario = Scenario(
            spec=spec_of(policy),
            calibration=calibration,
            trace=events,
            costs=costs if policy.keeps_state else without_start(costs),
            hours=seconds / 3600,
            notice_s=spot.notice_s,
            noticed=spot.noticed,
        )
        return replay(scenario, (policy.name,), fixed_depth=FIXED_DEPTH, planner=planner)[0]

    start_ms = math.ceil(1000 * _first_step_s(until(spot.delayed(10**9), _AMPLE_S)))
    events = spot.delayed(start_ms)
    before = until(events, start_ms / 1000)
    whole = until(events, start_ms / 1000 + window_s)
    formed = [morph for morph in whole.morphs if morph.rung is not None]
    return Predicted(
        window_s=window_s,
        steps=whole.steps - before.steps,
        seconds={item: whole.seconds[item] - before.seconds[item] for item in whole.seconds},
        lost_steps=whole.lost_steps - before.lost_steps,
        shapes=tuple(morph.after for morph in formed),
    )


def without_start(costs: MorphCosts) -> MorphCosts:
    """Of a policy under which all start again, what is measured as forming has the start in it."""
    return replace(costs, form_s=max(0.0, costs.form_s - costs.start_s - costs.trace_s))


def _first_step_s(outcome: Outcome) -> float:
    """When the first step on all nodes is done."""
    began = next(it for it in outcome.series if it.num_vms == NODES and it.num_used)
    return began.at_ns / 1e9 + BATCH / began.samples_per_s
