"""The chooser beside every single policy, over made-up markets and over that of Bamboo's trace.

For each market and model each policy is replayed with the same seeds. The difference to the best single
policy is paired by seed, with a confidence interval of 95 % (Student's t).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

from makara.examples.replay.make_calibration import M, calibration
from makara.manager.replay import POLICIES, Outcome, Scenario, replay
from makara.manager.replay.markets import MARKETS, trace_of
from makara.manager.replay.planner import CachedPlanner
from makara.manager.spec.job_spec import JobSpec, parse_spec
from makara.simulator import Calibration, MorphCosts, warm_up

from .replay import example
from .report import Row

TITLE = "samples/s of each policy, and of the chooser beside the best of the others"
OURS = "makara"
_ALLOWED = 0.01  # of the best single policy's samples/s
_T = {2: 4.303, 3: 3.182, 5: 2.571, 9: 2.262, 10: 2.228}  # Student's t at 95 %, by degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT-2 by the arithmetic of `examples/replay`, on single-V100 VMs of 16 GB."""

    blocks: int
    hidden: int
    heads: int
    batch: int


MODELS = {
    "small batch": Model(blocks=24, hidden=1024, heads=16, batch=256),  # 0.35 billion parameters
    "large batch": Model(blocks=24, hidden=1024, heads=16, batch=2048),
    "tight memory": Model(blocks=32, hidden=1920, heads=20, batch=1024),  # 1.6 billion: 4 VMs and more
}


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is replayed."""

    markets: Sequence[str]
    models: Sequence[str]
    seeds: int
    hours: float
    nodes: int


WHOLE = Amount(tuple(MARKETS), tuple(MODELS), seeds=10, hours=6.0, nodes=16)
QUICK = Amount(("calm", "stormy", "stormy-groups", "waves-notice"), ("small batch",), 3, 2.0, 8)


def rows(*, quick: bool = False) -> list[Row]:
    """One row for each market and model, then the criterion; two processes."""
    warm_up(wait=True)
    amount = QUICK if quick else WHOLE
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        cells = [
            pool.submit(cell, market, model, amount) for model in amount.models for market in amount.markets
        ]
        found: list[Row] = []
        for each in cells:
            found.append(each.result())
            print("  ".join(str(value) for value in found[-1].values()), file=sys.stderr, flush=True)
    return found if quick else [*found, *papers_market()]


def cell(market: str, model: str, amount: Amount) -> Row:
    """All policies and seeds of one market and model."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in POLICIES}
    for seed in range(amount.seeds):
        scenario = scenario_of(market, MODELS[model], seed=seed, hours=amount.hours, nodes=amount.nodes)
        for outcome in replay(scenario, tuple(POLICIES), planner=_planner(model, amount.nodes)):
            outcomes[outcome.policy].append(outcome)
    rates = {name: [one.samples_per_s for one in each] for name, each in outcomes.items()}
    best, difference, around = beside_the_best(rates)
    return {
        "market": market,
        "model": model,
        **{name: statistics.fmean(each) for name, each in rates.items()},
        "best other": best,
        "ahead %": 100 * difference,
        "± %": 100 * around,
        "holds": difference + around >= -_ALLOWED,
        "why": why(outcomes[OURS], outcomes[best]),
    }


def beside_the_best(rates: Mapping[str, Sequence[float]]) -> tuple[str, float, float]:
    """The best single policy, by how much of its samples/s the chooser does more, and the interval's half."""
    best = max((name for name in rates if name != OURS), key=lambda name: statistics.fmean(rates[name]))
    mean = statistics.fmean(rates[best]) or 1.0
    differences = [ours - other for ours, other in zip(rates[OURS], rates[best], strict=True)]
    degrees = len(differences) - 1
    around = _T[degrees] * statistics.stdev(differences) / math.sqrt(len(differences))
    return best, statistics.fmean(differences) / mean, around / mean


def why(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str:
    """The items of the time account that differ most, in % of the time, and how fast useful steps are."""
    wall_s = sum(one.wall_s for one in ours)
    spent = {
        item: 100 * sum(a.seconds[item] - b.seconds[item] for a, b in zip(ours, theirs, strict=True)) / wall_s
        for item in ours[0].seconds
        if item != "useful"
    }
    largest = sorted(spent, key=lambda item: -abs(spent[item]))[:2]
    told = [f"{item} {spent[item]:+.1f}" for item in largest if abs(spent[item]) >= 0.1]
    faster = 100 * (_pace(ours) / _pace(theirs) - 1) if _pace(theirs) else 0.0
    return ", ".join([*told, f"pace {faster:+.1f} %"])


def _pace(outcomes: Sequence[Outcome]) -> float:
    """Samples for each second of useful steps."""
    useful_s = sum(one.seconds["useful"] for one in outcomes)
    return sum(one.samples for one in outcomes) / useful_s if useful_s else 0.0


def scenario_of(market: str, model: Model, *, seed: int, hours: float, nodes: int) -> Scenario:
    """One market, model and seed."""
    kind = MARKETS[market]
    return Scenario(
        spec=_spec(model, nodes),
        calibration=_calibration(model),
        trace=trace_of(kind, seed=seed, nodes=nodes, hours=hours),
        costs=MorphCosts(boot_s=kind.boot_s, start_s=20.0),
        hours=hours,
        notice_s=kind.notice_s,
    )


def papers_market() -> list[Row]:
    """Bamboo's trace with the paper's model and batch: one seed, for there is one trace."""
    given, found = example(calibration()), list[Row]()
    planner = CachedPlanner()
    for outcome in replay(given, tuple(POLICIES), planner=planner):
        found.append(
            {
                "bamboo-p3": outcome.policy,
                "samples/s": outcome.samples_per_s,
                "goodput %": 100 * outcome.goodput,
                "steps again": outcome.lost_steps,
                "cut off %": 100 * outcome.seconds["cut_off"] / outcome.wall_s,
            }
        )
    return found


@cache
def _planner(model: str, nodes: int) -> CachedPlanner:
    """Of this process: what is known of a model serves all markets."""
    del model, nodes
    return CachedPlanner()


@cache
def _calibration(model: Model) -> Calibration:
    return calibration(model.blocks, model.hidden, model.heads)


@cache
def _spec(model: Model, nodes: int) -> JobSpec:
    assert model.batch % M == 0, "a batch of whole micro-batches"
    return parse_spec(
        {
            "name": "market",
            "entrypoint": "train:build",
            "resources": {"provider": "local", "max_nodes": nodes, "device_memory": 16 * 10**9},
            "training": {"global_batch_size": model.batch, "steps": 10**8},
            "parallelism": {"unequal_pipelines": "auto"},
            "checkpoint": {"uri": "file:///checkpoints", "interval": "10m"},
        }
    )
