"""What closes a step: sums beside the last operations, the commit, the update of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ..pipeline import Plan, Range
from .cluster import NS_PER_S, Cluster, to_ns

TALLY_BYTES = 16  # for each micro-batch: the sum of its loss and its weight
COMMIT_BYTES = 64  # a commit carries a handful of numbers; its time is all latency


class ClosingKind(StrEnum):
    TALLY = "tally"
    """Summing losses and weights over all workers."""
    SUM = "sum"
    """Summing a section's gradients over its hosts."""
    COMMIT = "commit"
    UPDATE = "update"
    """The optimizer, over the worker's whole range."""


class Closing(NamedTuple):
    """What closes a step on a worker, from `start_s` to `stop_s`: sums run beside operations, the rest after
    them. `section` is that of a sum of gradients."""

    worker: int
    kind: ClosingKind
    section: int | None
    start_s: float
    stop_s: float


@dataclass(slots=True)
class Seat:
    """Workers that host the same range and do the same at the same times. Times in ns."""

    workers: Sequence[int]
    span: Range
    apply_ns: int
    """Of the update of the weights."""
    stop_ns: int = 0
    busy_ns: int = 0
    peak_bytes: int = 0
    """Beyond the state, while operations run."""
    ends_ns: dict[int, int] = field(default_factory=dict[int, int])
    """By section: when its last backward ended."""


class Closed(NamedTuple):
    """A `Closing` of all workers of some seats, in nanoseconds."""

    seats: Sequence[Seat]
    kind: ClosingKind
    section: int | None
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Ended:
    """When a step is over."""

    pipeline_ns: int
    committed_ns: int
    end_ns: int
    closed: Sequence[Closed]


def close_step(plan: Plan, cluster: Cluster, seats: Sequence[Seat], losses_ns: int) -> Ended:
    """`losses_ns`: when all forwards at ends of paths are done."""
    closed: list[Closed] = []
    summed_ns = _sum_all(plan, cluster, seats, losses_ns, closed)
    ready_ns = max(summed_ns, *(seat.stop_ns for seat in seats))
    committed_ns = ready_ns + _allreduce_ns(cluster, seats, COMMIT_BYTES)
    closed.append(Closed(seats, ClosingKind.COMMIT, None, ready_ns, committed_ns))
    end_ns = committed_ns
    for seat in seats:
        applied_ns = committed_ns + seat.apply_ns
        closed.append(Closed([seat], ClosingKind.UPDATE, None, committed_ns, applied_ns))
        end_ns = max(end_ns, applied_ns)
    return Ended(max(seat.stop_ns for seat in seats), committed_ns, end_ns, closed)


def _sum_all(
    plan: Plan, cluster: Cluster, seats: Sequence[Seat], losses_ns: int, closed: list[Closed]
) -> int:
    """When the last of the sums is over: of the losses, then of the gradients, sections descending.

    Each worker does them one after the other beside its operations. A sum begins when all hosts have come to
    it and have done their last backward of its section; the losses when all forwards at ends of paths are
    done.
    """
    tallied_ns = losses_ns + _allreduce_ns(cluster, seats, TALLY_BYTES * plan.num_micro_batches)
    closed.append(Closed(seats, ClosingKind.TALLY, None, losses_ns, tallied_ns))
    free_ns = [tallied_ns] * len(seats)
    hosts_of: list[list[int]] = [[] for _ in range(plan.num_sections)]
    for number, seat in enumerate(seats):
        for section in seat.span.sections:
            hosts_of[section].append(number)
    for section in reversed(range(plan.num_sections)):
        numbers = hosts_of[section]
        hosts = [seats[number] for number in numbers]
        if not numbers or (len(numbers) == 1 and len(hosts[0].workers) == 1):
            continue
        begin_ns = max([max(free_ns[number], seats[number].ends_ns.get(section, 0)) for number in numbers])
        summed_ns = begin_ns + _allreduce_ns(cluster, hosts, cluster.calibration.gradient_bytes[section])
        closed.append(Closed(hosts, ClosingKind.SUM, section, begin_ns, summed_ns))
        for number in numbers:
            free_ns[number] = summed_ns
    return max(free_ns)


def _allreduce_ns(cluster: Cluster, seats: Sequence[Seat], size_bytes: int) -> int:
    """Over all workers of the seats."""
    num_workers = sum([len(seat.workers) for seat in seats])
    if num_workers < 2:
        return 0
    ring_s = cluster.calibration.link(_on_one_vm(cluster, seats)).allreduce_s(size_bytes, num_workers)
    return to_ns(ring_s + cluster.calibration.collective_s)


def _on_one_vm(cluster: Cluster, seats: Sequence[Seat]) -> bool:
    vm_of = cluster.vm_of
    home = vm_of[seats[0].workers[0]]
    for seat in seats:
        for worker in seat.workers:
            if vm_of[worker] != home:
                return False
    return True


def closings_of(ended: Ended) -> tuple[Closing, ...]:
    """In the order in which each worker comes to them; what takes no time is left out."""
    found = [
        Closing(worker, one.kind, one.section, one.start_ns / NS_PER_S, one.stop_ns / NS_PER_S)
        for one in ended.closed
        if one.stop_ns > one.start_ns
        for seat in one.seats
        for worker in seat.workers
    ]
    return tuple(sorted(found, key=lambda one: (one.start_s, one.stop_s, one.worker)))
