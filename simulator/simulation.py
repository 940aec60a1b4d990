"""`simulate`: the seconds and bytes that a plan's step takes, by worker, and its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.plan import Plan, Range
from .backends import current
from .calibration.data import Calibration
from .cluster import NS_PER_S, Cluster
from .minibatch import PlayedStep, simulate_minibatch
from .pipelines import Kernels
from .spans import Span, memory_of, spans_of
from .step_end import AlikeWorkers, Closing, closings_of


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """A simulated step. Tuples are by worker in rank order; times in seconds."""

    time_s: float
    """From the first forward until the last worker has applied the step."""
    pipeline_s: float
    """Until the last backward has ended; the rest of `time_s` is all-reduces, commit and optimizer."""
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    """Peak memory, with a checkpoint of the previous step still on its way to the store."""
    # Empty if called with timeline=False:
    timeline: tuple[Span, ...]
    closings: tuple[Closing, ...]
    """In each worker's order; those that take no time are left out."""
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
    """Simulate one step of `plan` (Varuna §4.4). Equal arguments give equal results.

    `vm_of` names each worker's VM (default: each its own), which chooses the link; `slowdown` multiplies
    each worker's compute times; `seed` draws the links' jitter. `timeline=False` keeps nothing of single
    operations. Equal pipelines are simulated once. Raises `ValueError` naming the argument whose length does
    not fit the plan.
    """
    return simulate_with(
        current(), plan, cluster_of(plan, calibration, vm_of, slowdown), seed=seed, timeline=timeline
    )


def simulate_with(kernels: Kernels, plan: Plan, cluster: Cluster, *, seed: int, timeline: bool) -> MiniBatch:
    """`simulate` with the given kernels, interpreted or compiled."""
    step = simulate_minibatch(plan, cluster, kernels, seed=seed)
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


def cluster_of(
    plan: Plan, calibration: Calibration, vm_of: Sequence[str] | None, slowdown: Sequence[float] | None
) -> Cluster:
    """The machines of the arguments of `simulate`."""
    vms = [f"worker {worker}" for worker in range(plan.num_workers)] if vm_of is None else list(vm_of)
    factors = [1.0] * plan.num_workers if slowdown is None else list(slowdown)
    if calibration.num_sections != plan.num_sections:
        raise ValueError(
            f"calibration: it is of {calibration.num_sections} sections, the plan has {plan.num_sections}"
        )
    if plan.has_halves and not calibration.has_halves:
        raise ValueError("calibration: the plan has halves, and they were not measured (input_s, weight_s)")
    for name, given in (("vm_of", vms), ("slowdown", factors)):
        if len(given) != plan.num_workers:
            raise ValueError(f"{name}: {len(given)} entries for the plan's {plan.num_workers} workers")
    if any(not factor > 0 for factor in factors):
        raise ValueError("slowdown: every factor must be > 0")
    return Cluster(calibration, tuple(vms), tuple(factors))


def _lasting_bytes(cluster: Cluster, workers: Sequence[AlikeWorkers]) -> dict[Range, int]:
    """{range: bytes of state and of a checkpoint's copy on its way to the store}."""
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
    """Memory of each worker over time: the lasting bytes, plus those of the pipeline and the update."""
    held = memory_of(step.pipelines)
    result: list[tuple[tuple[float, int], ...]] = []
    for worker, span in enumerate(plan.ranges):
        steps = {0: 0} | dict(held.get(worker, ()))
        steps |= {step.end.committed_ns: cluster.sizes.update(span), step.end.end_ns: 0}
        result.append(
            tuple((at_ns / NS_PER_S, lasting[span] + size_bytes) for at_ns, size_bytes in steps.items())
        )
    return tuple(result)
