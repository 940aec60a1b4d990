"""Real steps of real processes against their prediction: `python -m benchmarks predictions`, in small.

The bound is wide: other programs may hold these processors. The benchmark, on a quiet machine, says how near.
"""

from __future__ import annotations

from benchmarks.emulated.fleet import fleet, in_fresh_process
from benchmarks.emulated.measuring import calibrated, planner_on
from benchmarks.emulated.models import transformer
from benchmarks.emulated.networks import Network
from benchmarks.wires import Emulation

NETWORK = Network("VMs of 2", Emulation(bytes_per_s=2e9, latency_s=1e-4, jitter_s=0.0), workers_per_vm=2)
WORKERS, MICRO_BATCHES = 4, 6
GRIDS = ((2, 2), (4, 1), (3, 1))


def ratios() -> list[float]:
    """Predicted over measured step of each of `GRIDS`; the processes are kept between them."""
    with fleet(transformer(0.010, num_sections=4), WORKERS, MICRO_BATCHES) as workers:
        planner = planner_on(workers, NETWORK, calibrated(workers))
        found: list[float] = []
        for depth, replicas in GRIDS:
            choice = planner.choose(depth, replicas)
            measured = workers.run(choice.plan, NETWORK, 3, workers=choice.workers)
            found.append(planner.predicted_s(choice) / measured.step_s)
        return found


def test_a_predicted_step_is_near_the_measured_one() -> None:
    found = in_fresh_process(ratios)
    assert all(0.4 < ratio < 2.5 for ratio in found), dict(zip(GRIDS, found, strict=True))
