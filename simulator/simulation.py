"""What a plan would take, for callers: seconds and bytes by worker, and the timeline if it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.plan import Plan, Range
from .backends import current
from .calibration.data import Calibration
from .cluster import NS_PER_S, Cluster
from .minibatch import PlayedStep, play_minibatch
from .pipelines import Kernels
from .spans import Span, memory_of, spans_of
from .step_end import AlikeWorkers, Closing, closings_of


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What a step takes. Tuples are by worker in rank order; seconds and bytes."""

    time_s: float
    """From the first forward until the last worker has applied the step."""
    pipeline_s: float
    """Until the last backward has ended; the rest is what is left of the sums, commit and optimizer."""
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    """With a checkpoint of the step before on its way to the store."""
    # Empty unless the timeline is asked for:
    timeline: tuple[Span, ...]
    closings: tuple[Closing, ...]
    """In the order in which each worker comes to them; what takes no time is left out."""
    memory: tuple[tuple[tuple[float, int], ...], ...]
    """For each worker (time_s, resident bytes from then on), from the start of the step to its end."""


def simulate(
    plan: Plan,
    calibration: Calibration,
    *,
    vm_of: Sequence[str] | None = None,
    slowdown: Sequence[float] | None = None,
    seed: int = 0,
    timeline: bool = True,
) -> MiniBatch:
    """Plays one step of `plan` (Varuna §4.4). The same arguments always give the same answer.

    `vm_of` names each worker's VM (left out: each its own), which chooses the link; `slowdown` multiplies
    each worker's compute times; `seed` draws the links' jitter. Without `timeline` nothing is kept of single
    operations. Pipelines that are alike are played once.
    Raises `ValueError` naming the argument whose length does not fit the plan.
    """
    return simulate_with(
        current(), plan, _cluster(plan, calibration, vm_of, slowdown), seed=seed, timeline=timeline
    )


def simulate_with(kernels: Kernels, plan: Plan, cluster: Cluster, *, seed: int, timeline: bool) -> MiniBatch:
    """`simulate`, by interpreted or by compiled kernels."""
    step = play_minibatch(plan, cluster, kernels, seed=seed, keeps_operations=timeline)
    lasting = _lasting_bytes(cluster, step.workers)
    update = {span: cluster.sizes.update(span) for span in lasting}
    by_worker: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * plan.num_workers
    for alike in step.workers:
        busy_ns = alike.busy_ns + alike.apply_ns
        peak = lasting[alike.span] + max(alike.peak_bytes, update[alike.span])
        one = busy_ns / NS_PER_S, (step.end.end_ns - busy_ns) / NS_PER_S, peak
        for worker in alike.workers:
            by_worker[worker] = one
    busy_s, idle_s, peak_bytes = zip(*by_worker, strict=True)
    return MiniBatch(
        time_s=step.end.end_ns / NS_PER_S,
        pipeline_s=step.end.pipeline_ns / NS_PER_S,
        busy_s=busy_s,
        idle_s=idle_s,
        peak_bytes=peak_bytes,
        timeline=spans_of(step.pipelines) if timeline else (),
        closings=closings_of(step.end) if timeline else (),
        memory=_memory(plan, cluster, step, lasting) if timeline else (),
    )


def _cluster(
    plan: Plan, calibration: Calibration, vm_of: Sequence[str] | None, slowdown: Sequence[float] | None
) -> Cluster:
    vms = [f"worker {worker}" for worker in range(plan.num_workers)] if vm_of is None else list(vm_of)
    factors = [1.0] * plan.num_workers if slowdown is None else list(slowdown)
    if calibration.num_sections != plan.num_sections:
        raise ValueError(
            f"calibration: it is of {calibration.num_sections} sections, the plan has {plan.num_sections}"
        )
    for name, given in (("vm_of", vms), ("slowdown", factors)):
        if len(given) != plan.num_workers:
            raise ValueError(f"{name}: {len(given)} entries for the plan's {plan.num_workers} workers")
    if any(not factor > 0 for factor in factors):
        raise ValueError("slowdown: every factor must be > 0")
    return Cluster(calibration, tuple(vms), tuple(factors))


def _lasting_bytes(cluster: Cluster, workers: Sequence[AlikeWorkers]) -> dict[Range, int]:
    """By range: state, and the copy of a checkpoint on its way to the store."""
    num_hosts = [0] * cluster.calibration.num_sections
    for alike in workers:
        for section in alike.span.sections:
            num_hosts[section] += len(alike.workers)
    sizes = cluster.sizes
    return {
        span: sizes.state(span) + sizes.snapshot([(section, num_hosts[section]) for section in span.sections])
        for span in {alike.span for alike in workers}
    }


def _memory(
    plan: Plan, cluster: Cluster, step: PlayedStep, lasting: dict[Range, int]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """What each worker holds over time: what lasts, then what the pipeline and the update add."""
    held = memory_of(step.pipelines)
    result: list[tuple[tuple[float, int], ...]] = []
    for worker, span in enumerate(plan.ranges):
        steps = {0: 0} | dict(held.get(worker, ()))
        steps |= {step.end.committed_ns: cluster.sizes.update(span), step.end.end_ns: 0}
        result.append(
            tuple((at_ns / NS_PER_S, lasting[span] + size_bytes) for at_ns, size_bytes in steps.items())
        )
    return tuple(result)
