"""One mini-batch of a plan in virtual time (Varuna §4.4).

In: a plan, which says P, D and the sections of each stage, and a cluster: the calibration of one micro-batch,
and the VM and slowdown of each worker. N micro-batches go through the pipelines, operation by operation; the
all-reduces run beside the last backwards; the commit and the optimizer follow. Out: the time per mini-batch,
in nanoseconds. `simulation` is the public interface, in seconds. The step that is predicted:
`makara.worker.execution.stepper`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.arrays import NONE, operation
from ..pipeline.plan import Plan, Range
from ..pipeline.policy import BACKWARD, FORWARD, WEIGHT
from .cluster import Cluster
from .pipelines import Kernels, PlayedPipeline, play_pipelines
from .step_end import AlikeWorkers, StepEnd, end_step


@dataclass(frozen=True, slots=True)
class PlayedStep:
    pipelines: Sequence[PlayedPipeline]
    workers: Sequence[AlikeWorkers]
    """All workers of the plan, in groups that do the same."""
    end: StepEnd


def simulate_minibatch(plan: Plan, cluster: Cluster, kernels: Kernels, *, seed: int) -> PlayedStep:
    """Simulate a step. `seed` draws the jitter."""
    pipelines = play_pipelines(plan, cluster, kernels, seed=seed)
    workers = [alike for pipeline in pipelines for alike in _alike_workers(plan, cluster, pipeline)]
    workers += _unused(plan, cluster, workers)
    losses_ns = max((_losses_ns(pipeline) for pipeline in pipelines), default=0)  # no rest: all is held
    return PlayedStep(pipelines, workers, end_step(plan, cluster, workers, losses_ns))


def _alike_workers(plan: Plan, cluster: Cluster, pipeline: PlayedPipeline) -> list[AlikeWorkers]:
    """The workers of equal pipelines, grouped by their place in them."""
    ranks = zip(*(component.by_first_visit for component in pipeline.alike), strict=True)
    result: list[AlikeWorkers] = []
    for record, workers in zip(pipeline.workers, ranks, strict=True):
        span = plan.ranges[workers[0]]
        apply_ns = cluster.apply_ns(workers[0], span)
        peak_bytes = record.peak_bytes
        result.append(AlikeWorkers(workers, span, apply_ns, busy_ns=record.busy_ns, peak_bytes=peak_bytes))
    taken = ((path, hop.range) for path in pipeline.alike[0].paths for hop in path.hops)
    for index, (hop, (path, span)) in enumerate(zip(pipeline.hops, taken, strict=True)):
        alike, began_ns = result[hop.worker], hop.last_weight_ns if hop.is_split else hop.last_backward_ns
        takes_ns = pipeline.operations[operation(index, WEIGHT if hop.is_split else BACKWARD)].takes_ns
        alike.stop_ns = max(alike.stop_ns, began_ns + takes_ns)
        # Sections end one by one within a backward.
        for section, share in cluster.backward_shares(span, path, halves=bool(hop.is_split)):
            ended_ns = began_ns + round(takes_ns * share)
            alike.ends_ns[section] = max(ended_ns, alike.ends_ns.get(section, 0))
    return result


def _unused(plan: Plan, cluster: Cluster, used: Sequence[AlikeWorkers]) -> list[AlikeWorkers]:
    """The workers that run no micro-batch."""
    rest = set(range(plan.num_workers)).difference(*(alike.workers for alike in used))
    found: dict[tuple[Range, float], list[int]] = {}
    for worker in sorted(rest):
        found.setdefault((plan.ranges[worker], cluster.slowdown[worker]), []).append(worker)
    return [
        AlikeWorkers(workers, span, cluster.apply_ns(workers[0], span))
        for (span, _), workers in found.items()
    ]


def _losses_ns(pipeline: PlayedPipeline) -> int:
    """When the forwards of all last hops are done."""
    return max(
        hop.last_forward_ns + pipeline.operations[operation(index, FORWARD)].takes_ns
        for index, hop in enumerate(pipeline.hops)
        if hop.after == NONE
    )
