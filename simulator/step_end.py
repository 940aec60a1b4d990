"""The end of a step: all-reduces beside the last operations, the commit, the update of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ..pipeline.plan import Plan, Range
from ..pipeline.sum_order import sum_order
from .cluster import NS_PER_S, Cluster, to_ns

LOSS_ALLREDUCE_BYTES = 16  # per micro-batch: the sum of its loss and its weight
COMMIT_BYTES = 64  # a commit carries a few numbers; its time is latency


class ClosingKind(StrEnum):
    LOSS_ALLREDUCE = "tally"
    """Summing losses and weights over all workers."""
    GRADIENT_ALLREDUCE = "sum"
    """Summing a section's gradients over its hosts."""
    COMMIT = "commit"
    UPDATE = "update"
    """The optimizer, over the worker's whole range."""

    @property
    def is_beside(self) -> bool:
        """Whether it runs beside other operations, not after them."""
        return self in (ClosingKind.LOSS_ALLREDUCE, ClosingKind.GRADIENT_ALLREDUCE)


class Closing(NamedTuple):
    """A closing operation of a step on a worker, from `start_s` to `stop_s`. `section` is that of a gradient
    all-reduce."""

    worker: int
    kind: ClosingKind
    section: int | None
    start_s: float
    stop_s: float


@dataclass(slots=True)
class AlikeWorkers:
    """Workers that host the same range and do the same at the same times. Times in ns."""

    workers: Sequence[int]
    span: Range
    apply_ns: int
    """Time of the update of the weights."""
    stop_ns: int = 0
    busy_ns: int = 0
    peak_bytes: int = 0
    """Peak memory beyond the state, while operations run."""
    ends_ns: dict[int, int] = field(default_factory=dict[int, int])
    """{section: when its last backward ended}."""


class Closed(NamedTuple):
    """A closing operation shared by all workers of some groups, in nanoseconds."""

    groups: Sequence[AlikeWorkers]
    kind: ClosingKind
    section: int | None
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """When the parts of a step are over, in nanoseconds from its start."""

    pipeline_ns: int
    summed_ns: Sequence[int]
    """For each group of workers, when its operations and its sums are over."""
    committed_ns: int
    end_ns: int
    closed: Sequence[Closed]


def end_step(plan: Plan, cluster: Cluster, groups: Sequence[AlikeWorkers], losses_ns: int) -> StepEnd:
    """Simulate the end of a step. `losses_ns`: when the forwards of all last hops are done."""
    closed: list[Closed] = []
    free_ns = _sum_all(plan, cluster, groups, losses_ns, closed)
    summed_ns = [max(free, group.stop_ns) for free, group in zip(free_ns, groups, strict=True)]
    ready_ns = max(summed_ns)
    committed_ns = ready_ns + _allreduce_ns(cluster, groups, COMMIT_BYTES)
    closed.append(Closed(groups, ClosingKind.COMMIT, None, ready_ns, committed_ns))
    end_ns = committed_ns
    for group in groups:
        applied_ns = committed_ns + group.apply_ns
        closed.append(Closed([group], ClosingKind.UPDATE, None, committed_ns, applied_ns))
        end_ns = max(end_ns, applied_ns)
    return StepEnd(max(group.stop_ns for group in groups), summed_ns, committed_ns, end_ns, closed)


def _sum_all(
    plan: Plan, cluster: Cluster, groups: Sequence[AlikeWorkers], losses_ns: int, closed: list[Closed]
) -> list[int]:
    """Simulate the all-reduces: of the losses, then of the gradients in `sum_order`. Return for each
    group when its last one ends.

    Each worker runs them one after the other beside its operations, those of tied parameters last; a section
    without gradients has none. A section's begins when all its hosts have reached it and have done their last
    backward of the section; that of the losses at `losses_ns`.
    """
    tallied_ns = losses_ns + _allreduce_ns(cluster, groups, LOSS_ALLREDUCE_BYTES * plan.num_micro_batches)
    closed.append(Closed(groups, ClosingKind.LOSS_ALLREDUCE, None, losses_ns, tallied_ns))
    free_ns = [tallied_ns] * len(groups)
    hosts_of: list[list[int]] = [[] for _ in range(plan.num_sections)]
    for number, group in enumerate(groups):
        for section in group.span.sections:
            hosts_of[section].append(number)
    own = cluster.calibration.own_gradient_bytes
    sums = [((section,), own[section]) for section in sum_order(plan)]
    tied = sorted(cluster.calibration.tied_sums, key=lambda one: one.sections, reverse=True)
    for sections, size_bytes in (*sums, *((one.sections, one.gradient_bytes) for one in tied)):
        numbers = sorted({number for section in sections for number in hosts_of[section]})
        hosts = [groups[number] for number in numbers]
        if not size_bytes or not numbers or (len(numbers) == 1 and len(hosts[0].workers) == 1):
            continue
        begin_ns = max(
            max(free_ns[number], groups[number].ends_ns.get(section, 0))
            for number in numbers
            for section in sections
        )
        summed_ns = begin_ns + _allreduce_ns(cluster, hosts, size_bytes)
        closed.append(Closed(hosts, ClosingKind.GRADIENT_ALLREDUCE, sections[0], begin_ns, summed_ns))
        for number in numbers:
            free_ns[number] = summed_ns
    return free_ns


def _allreduce_ns(cluster: Cluster, groups: Sequence[AlikeWorkers], size_bytes: int) -> int:
    """The time of an all-reduce over all workers of the groups."""
    num_workers = sum(len(group.workers) for group in groups)
    if num_workers < 2:
        return 0
    ring_s = cluster.calibration.link(_on_one_vm(cluster, groups)).allreduce_s(size_bytes, num_workers)
    return to_ns(ring_s + cluster.calibration.collective_s)


def _on_one_vm(cluster: Cluster, groups: Sequence[AlikeWorkers]) -> bool:
    home = cluster.vm_of[groups[0].workers[0]]
    return all(cluster.vm_of[worker] == home for group in groups for worker in group.workers)


def closings_of(end: StepEnd) -> tuple[Closing, ...]:
    """The closing operations in each worker's order; those that take no time are left out."""
    found = [
        Closing(worker, one.kind, one.section, one.start_ns / NS_PER_S, one.stop_ns / NS_PER_S)
        for one in end.closed
        if one.stop_ns > one.start_ns
        for group in one.groups
        for worker in group.workers
    ]
    return tuple(sorted(found, key=lambda one: (one.start_s, one.stop_s, one.worker)))
