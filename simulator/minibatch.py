"""One mini-batch of a plan in virtual time (Varuna §4.4).

In: a plan, which says P, D and the sections of each stage, and a cluster: what one micro-batch takes, as
measured beforehand, where the workers are and how slow each is. N micro-batches go through the pipelines,
operation by operation; the all-reduces run beside the last backwards; the commit and the optimizer follow.
Out: the time per mini-batch, in nanoseconds. `simulation` makes of it what callers ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.arrays import NONE, operation
from ..pipeline.plan import Plan, Range
from ..pipeline.policy import BACKWARD, FORWARD
from .cluster import Cluster
from .pipelines import Kernels, PlayedPipeline, play_pipelines
from .step_end import AlikeWorkers, StepEnd, end_step


@dataclass(frozen=True, slots=True)
class PlayedStep:
    pipelines: Sequence[PlayedPipeline]
    workers: Sequence[AlikeWorkers]
    """All of the plan."""
    end: StepEnd


def play_minibatch(
    plan: Plan, cluster: Cluster, kernels: Kernels, *, seed: int, keeps_operations: bool
) -> PlayedStep:
    """`seed` draws the delays of messages; `keeps_operations`: when each ran, not only what came of them."""
    pipelines = play_pipelines(plan, cluster, kernels, seed=seed, keeps_operations=keeps_operations)
    workers = [alike for pipeline in pipelines for alike in _alike_workers(plan, cluster, pipeline)]
    workers += _unused(plan, cluster, workers)
    losses_ns = max(_losses_ns(pipeline) for pipeline in pipelines)
    return PlayedStep(pipelines, workers, end_step(plan, cluster, workers, losses_ns))


def _alike_workers(plan: Plan, cluster: Cluster, pipeline: PlayedPipeline) -> list[AlikeWorkers]:
    """The workers of pipelines that are alike, those at one place of all of them together."""
    ranks = zip(*(component.by_first_visit for component in pipeline.alike), strict=True)
    result: list[AlikeWorkers] = []
    for record, workers in zip(pipeline.workers, ranks, strict=True):
        span = plan.ranges[workers[0]]
        apply_ns = cluster.apply_ns(workers[0], span)
        peak_bytes = record.peak_bytes
        result.append(AlikeWorkers(workers, span, apply_ns, busy_ns=record.busy_ns, peak_bytes=peak_bytes))
    ranges = (hop.range for path in pipeline.alike[0].paths for hop in path.hops)
    for index, (hop, span) in enumerate(zip(pipeline.hops, ranges, strict=True)):
        alike, began_ns = result[hop.worker], hop.last_backward_ns
        takes_ns = pipeline.operations[operation(index, BACKWARD)].takes_ns
        alike.stop_ns = max(alike.stop_ns, began_ns + takes_ns)
        for section, share in cluster.backward_shares(span):  # within an operation, by their shares
            ended_ns = began_ns + round(takes_ns * share)
            alike.ends_ns[section] = max(ended_ns, alike.ends_ns.get(section, 0))
    return result


def _unused(plan: Plan, cluster: Cluster, used: Sequence[AlikeWorkers]) -> list[AlikeWorkers]:
    """The workers that no micro-batch comes to."""
    rest = set(range(plan.num_workers)).difference(*(alike.workers for alike in used))
    found: dict[tuple[Range, float], list[int]] = {}
    for worker in sorted(rest):
        found.setdefault((plan.ranges[worker], cluster.slowdown[worker]), []).append(worker)
    return [
        AlikeWorkers(workers, span, cluster.apply_ns(workers[0], span))
        for (span, _), workers in found.items()
    ]


def _losses_ns(pipeline: PlayedPipeline) -> int:
    """When all forwards at ends of paths are done."""
    return max(
        hop.last_forward_ns + pipeline.operations[operation(index, FORWARD)].takes_ns
        for index, hop in enumerate(pipeline.hops)
        if hop.after == NONE
    )
