"""Whether the plan that is chosen is the fastest: for each case, the best plan of every P is run for real.

One emulated cluster serves all cases of a model (see docs/predictions.md): its processes go from plan to plan
as trainers do in a morph. A case uses the first G of its workers; the others hold nothing meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from makara.morphing import Choice

from .emulated.cases import Planner
from .emulated.fleet import Fleet, Measured, fleet, in_fresh_process
from .emulated.measuring import calibrated, planner_on
from .emulated.models import SCALE, Emulated, pyramid, transformer, uneven
from .emulated.networks import Network
from .report import Row
from .wires import Emulation

TITLE = (
    "measured throughput of the chosen plan over that of the best of all P (1 is the best); "
    f"operations asleep for 10 ms and more, tensors and link rates times {SCALE:g}"
)
NUM_WORKERS = 24
NUM_MICRO_BATCHES = 24
STEPS = 3
FAST = Network("40 Gbit/s", Emulation(bytes_per_s=5e9, latency_s=50e-6, jitter_s=0.0))
USUAL = Network("10 Gbit/s", Emulation(bytes_per_s=1.25e9, latency_s=100e-6, jitter_s=0.0))
SLOW = Network(
    "3 Gbit/s, VMs of 4",
    Emulation(bytes_per_s=0.375e9, latency_s=200e-6, jitter_s=0.0),
    workers_per_vm=4,
)
MODELS = (partial(transformer, num_sections=6), partial(uneven, num_pairs=2), pyramid)
CASES = (
    (0.010, ((FAST, 8), (FAST, 12), (USUAL, 8), (SLOW, 8))),
    (0.020, ((FAST, 16), (USUAL, 16), (SLOW, 16), (SLOW, 24))),
)
"""(seconds of the shortest operation, (network, G)), for each of the models. More workers on the same cores
take longer operations, or the cores would decide; 24 are on the slow network alone, where P = 1 is slow."""


@dataclass(frozen=True, slots=True)
class _Tried:
    choice: Choice
    predicted_s: float
    measured: Measured

    @property
    def shape(self) -> str:
        return self.choice.plan.shape


def rows() -> list[Row]:
    began = time.monotonic()
    found = [
        row
        for shortest_s, cases in CASES
        for build in MODELS
        for row in in_fresh_process(_rows_of, build(shortest_s), cases)
    ]
    ratios = [float(row["of the best"]) for row in found]
    empty: dict[str, str | float] = dict.fromkeys(found[0], "")
    minutes = (time.monotonic() - began) / 60
    return [
        *found,
        empty | {"model": "least", "of the best": min(ratios)},
        empty | {"model": f"{len(found)} cases in {minutes:.1f} minutes"},
    ]


def _rows_of(model: Emulated, cases: Sequence[tuple[Network, int]]) -> list[Row]:
    with fleet(model, NUM_WORKERS, NUM_MICRO_BATCHES) as workers:
        calibration = calibrated(workers)
        planners = {network.name: planner_on(workers, network, calibration) for network in dict(cases)}
        found: list[Row] = []
        for network, count in cases:
            planner = replace(planners[network.name], workers=workers.names[:count])
            found.append(_row(model, workers, planner))
            print(", ".join(f"{name} {value}" for name, value in found[-1].items()), file=sys.stderr)
        return found


def _row(model: Emulated, workers: Fleet, planner: Planner) -> Row:
    """Every P's best plan, and the one that is chosen among all, which is one of them."""
    count = len(planner.workers)
    depths = range(1, min(len(model.layers), count) + 1)
    tried = [_try(workers, planner, planner.choose(depth)) for depth in depths]
    choice = planner.choose()
    same = [one for one in tried if one.choice.plan == choice.plan]
    if not same:  # of the P that it chose, alone, it would have taken another window or D
        tried += (same := [_try(workers, planner, choice)])
    (chosen,) = same
    best = min(tried, key=lambda one: one.measured.step_s)
    return {
        "model": model.name,
        "shortest operation ms": 1000 * min(layer.forward_s for layer in model.layers),
        "network": planner.network.name,
        "G": count,
        "chosen": chosen.shape,
        "best": best.shape,
        "of the best": best.measured.step_s / chosen.measured.step_s,
        "step s": chosen.measured.step_s,
        "error %": 100 * (chosen.predicted_s / chosen.measured.step_s - 1),
        "worst error %": max((100 * (one.predicted_s / one.measured.step_s - 1) for one in tried), key=abs),
        "spread %": 100 * max(one.measured.spread for one in tried),
        "CPU idle %": 100 * min(one.measured.idle_cpu for one in tried),
        "MB/s": max(one.measured.bytes_per_s for one in tried) / 1e6,
    }


def _try(workers: Fleet, planner: Planner, choice: Choice) -> _Tried:
    measured = workers.run(choice.plan, planner.network, STEPS, workers=choice.workers)
    return _Tried(choice, planner.predicted_s(choice), measured)
