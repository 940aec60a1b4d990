"""Policies on a spot market of a few minutes: real managers and trainers, beside what a replay says.

For each policy a manager of its own, local VMs of one worker each, and the same market. Operations sleep, so
that two cores do for eight workers. The replay is given the calibration of the job, what its VMs and its
changes of plan took (means), and nothing of what came of it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from makara.manager.replay import POLICIES
from makara.simulator import MorphCosts, warm_up

from .report import Row
from .spot.job import BATCH, NUM_MICRO_BATCHES, write_code
from .spot.market import NODES, SEED, WINDOW_S, Spot, spot
from .spot.measured import costs, measured
from .spot.predicted import Predicted, predicted
from .spot.record import Record, record

REAL = ("makara", "varuna", "oobleck", "slipstream", "fixed")
"""What `bamboo` has workers do twice is simulated only."""
_APART = 0.1
TITLE = (
    f"a spot market (seed {SEED}) of {NODES} nodes for {WINDOW_S:g} s, N={NUM_MICRO_BATCHES}, operations "
    "asleep for 20 ms and more: goodput and samples/s of real processes, and as replayed"
)


def rows() -> list[Row]:
    market = spot()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code = write_code(Path(folder) / "code")
        found = [record(name, market, WINDOW_S, Path(folder), code) for name in REAL]
    return table(found, market)


def table(records: Sequence[Record], market: Spot) -> list[Row]:
    """One row for each policy, then what is asked of the predictions."""
    warm_up(wait=True)
    found = [_row(one, market) for one in records]
    return [*found, *(judged(found, name) for name in ("goodput %", "samples/s"))]


def judged(found: Sequence[Mapping[str, Any]], name: str) -> Row:
    """How far predictions are from what was measured, and whether they put policies in the same order."""
    real, told = ([row[it] for row in found] for it in (name, f"predicted {name}"))
    pairs = [(a, b) for a, b in permutations(range(len(found)), 2) if real[a] > (1 + _APART) * real[b]]
    return {
        "of": name,
        "farthest, predicted / measured": max(
            (each / it for each, it in zip(told, real, strict=True)), key=lambda ratio: abs(math.log(ratio))
        ),
        f"pairs more than {100 * _APART:g} % apart": len(pairs),
        "of them predicted in the same order": sum(told[a] > told[b] for a, b in pairs),
    }


def _row(one: Record, market: Spot) -> Row:
    policy = POLICIES[one.policy]
    found = costs(one.view, one.played)
    real = measured(one.view, one.steps, one.start, one.window_s)
    told = predicted(policy, market, one.calibration, found, one.window_s)
    return {
        "policy": one.policy,
        "goodput %": 100 * real.goodput,
        "predicted goodput %": 100 * told.goodput,
        "goodput, predicted / measured": told.goodput / real.goodput,
        "samples/s": BATCH * real.steps / one.window_s,
        "predicted samples/s": BATCH * told.steps / one.window_s,
        "samples/s, predicted / measured": told.steps / real.steps,
        "steps lost": real.lost_steps,
        "predicted steps lost": told.lost_steps,
        "plans": " ".join(real.shapes),
        "predicted plans": " ".join(told.shapes),
        "first step s longer": real.first_extra_s,
        "predicted, not useful s": _rest(told),
        "costs": _costs(found),
    }


def _rest(told: Predicted) -> str:
    return ", ".join(
        f"{item} {spent_s:.1f}"
        for item, spent_s in told.seconds.items()
        if item != "useful" and spent_s >= 0.05
    )


def _costs(found: MorphCosts) -> str:
    times = {name: value for name, value in found.to_json().items() if name.endswith("_s")}
    return ", ".join(f"{name} {value:.3g}" for name, value in times.items())
