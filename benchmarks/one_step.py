"""One configuration in virtual time: 36 stages, a batch of 8192, 128 GPUs, as in Varuna §7.2.

The paper gives no micro-batch size. 8192 micro-batches are the most that can be, 2048 are of 4 samples each.
"""

from __future__ import annotations

import subprocess
import sys
import time

from makara.pipeline import Plan, grid
from makara.simulator import Calibration
from makara.simulator.backends import INTERPRETED, compiled
from makara.simulator.cluster import Cluster
from makara.simulator.pipelines import Kernels
from makara.simulator.simulation import simulate_with

from .made_up import model, stages
from .timing import Figure, median

DEPTH, REPLICAS, NUM_MICRO_BATCHES = 36, 3, 8192


def one_step() -> list[Figure]:
    """(what, median CPU seconds of the thread, of how many): other work may share the cores."""
    fast = compiled()
    rows: list[Figure] = []
    for recompute in (False, True):
        for window in (None, 2 * DEPTH, 4 * DEPTH):
            plan = grid(stages(DEPTH, DEPTH), REPLICAS, NUM_MICRO_BATCHES, recompute=recompute, window=window)
            kind = f"P=36 D=3 N=8192, window {window}, recompute {'on' if recompute else 'off'}"
            rows += [
                (f"{kind}, compiled", *_median(fast, plan, 0.0, 15)),
                (f"{kind}, compiled, jitter", *_median(fast, plan, 1e-3, 5)),
            ]
        fours = grid(stages(DEPTH, DEPTH), REPLICAS, NUM_MICRO_BATCHES // 4, recompute=recompute)
        kind = f"P=36 D=3 N=2048, recompute {'on' if recompute else 'off'}"
        rows.append((f"{kind}, compiled", *_median(fast, fours, 0.0, 15)))
    rows.append(("the last, interpreted", *_median(INTERPRETED, plan, 0.0, 1)))
    for depth, replicas in ((36, 277), (18, 555), (2, 5000)):
        plan = grid(stages(DEPTH, depth), replicas, NUM_MICRO_BATCHES, recompute=True, window=4 * depth)
        rows.append((f"P={depth} D={replicas} N=8192, compiled", *_median(fast, plan, 0.0, 5)))
    rows.append(("first use in a process, compiled earlier", _first_use(), 1))
    return rows


def _median(kernels: Kernels, plan: Plan, jitter_s: float, repeats: int) -> tuple[float, int]:
    cluster = Cluster(
        uneven(DEPTH, jitter_s),
        [f"vm{worker // 4}" for worker in range(plan.num_workers)],
        [1.0] * plan.num_workers,
    )
    return median(
        lambda: simulate_with(kernels, plan, cluster, seed=0, timeline=False), repeats, time.thread_time
    )


def _first_use() -> float:
    """CPU seconds of importing numba and loading compiled code, in a new process."""
    code = (
        "import time; from makara.simulator.backends import compiled; began = time.process_time(); "
        "compiled(); print(time.process_time() - began)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def uneven(sections: int, jitter_s: float) -> Calibration:
    """Sections whose times differ by up to 20 %: 10 to 12 ms forwards."""
    # The fractional parts of multiples of the golden ratio are spread evenly.
    return model(
        tuple(0.01 + 0.002 * (number * 0.6180339887 % 1) for number in range(sections)), jitter_s=jitter_s
    )
