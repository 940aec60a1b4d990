"""Staggered updates (SlipStream §3.3): a worker begins the next step as soon as its own sections are updated.

Later stages then still work on a step while earlier ones run forwards of the next, so a pipeline fills while
it drains. In simulations only: see `docs/simulation-and-choice.md` for what it would take for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..pipeline.plan import Plan
from .backends import current
from .calibration.data import Calibration
from .cluster import NS_PER_S
from .minibatch import simulate_minibatch
from .simulation import cluster_of


def staggered_step_s(
    plan: Plan,
    calibration: Calibration,
    *,
    vm_of: Sequence[str] | None = None,
    slowdown: Sequence[float] | None = None,
    num_steps: int = 16,
    seed: int = 0,
) -> float:
    """Seconds of a step in steady state: the mean over the second half of `num_steps` steps, at least two.

    A worker applies a step once its sections' gradients are summed, without waiting for a commit. All its
    operations of a step are over before it begins the next, so steps are simulated one after the other, each
    from the moments at which its workers begin it. Wires are free again by then. The rest is as for
    `simulate`.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps: {num_steps}, expected at least 2")
    cluster, ends_ns = cluster_of(plan, calibration, vm_of, slowdown), list[int]()
    for step in range(num_steps):
        played = simulate_minibatch(plan, cluster, current(), seed=seed + step)
        starts_ns = [0] * plan.num_workers
        for alike, summed_ns in zip(played.workers, played.end.summed_ns, strict=True):
            for worker in alike.workers:
                starts_ns[worker] = summed_ns + alike.apply_ns
        cluster = replace(cluster, starts_ns=tuple(starts_ns))
        ends_ns.append(max(starts_ns))
    half = num_steps // 2
    return (ends_ns[-1] - ends_ns[half - 1]) / (num_steps - half) / NS_PER_S
