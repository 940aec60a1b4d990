"""One mini-batch of a plan in virtual time: pipelines, the sums beside them, the commit, the optimizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..pipeline import Component, Kind, Operation, Plan, Range, components, orders
from .calibration import Calibration
from .engine import NS_PER_S, to_ns
from .play import Cluster, Played, Timed, play

TALLY_BYTES = 16  # for each micro-batch: the sum of its loss and its weight
COMMIT_BYTES = 64  # a commit carries a handful of numbers; its time is all latency


class Span(NamedTuple):
    """An operation ran on a worker from `start_s` to `stop_s` after the start of the step."""

    worker: int
    operation: Operation
    start_s: float
    stop_s: float


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
    cluster = _cluster(plan, calibration, vm_of, slowdown)
    draw = random.Random(seed)
    per_worker = orders(plan)
    played: dict[Hashable, tuple[Component, Played]] = {}
    parts: list[Played] = []
    for part in components(plan):
        key = _likeness(part, cluster)
        if key is not None and key in played:
            parts.append(_transferred(*played[key], part))
            continue
        result = play(plan, part, per_worker, cluster, draw)
        parts.append(result)
        if key is not None:
            played[key] = (part, result)
    return _finish(plan, cluster, parts, timeline)


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


def _likeness(part: Component, cluster: Cluster) -> Hashable | None:
    """Equal for components that take equal times; None if jitter makes each one different."""
    if part.signature is None:
        return None
    hops = part.paths[0].hops
    links = [cluster.link(one.worker, other.worker) for one, other in itertools.pairwise(hops)]
    if any(link.jitter_s for link in links):
        return None
    return (
        part.signature,
        tuple(hop.range for hop in hops),
        tuple(cluster.slowdown[hop.worker] for hop in hops),
        tuple(links),
    )


def _transferred(done: Component, played: Played, part: Component) -> Played:
    """What was played for one component, told of the workers and micro-batches of another that is like it."""
    old, new = done.paths[0], part.paths[0]
    worker_of = {a.worker: b.worker for a, b in zip(old.hops, new.hops, strict=True)}
    micro_batch_of = dict(zip(old.micro_batches, new.micro_batches, strict=True))
    return Played(
        spans=[
            (
                worker_of[worker],
                Operation(task.stage, task.kind, micro_batch_of[task.micro_batch]),
                start,
                stop,
            )
            for worker, task, start, stop in played.spans
        ],
        peak_bytes={worker_of[worker]: peak for worker, peak in played.peak_bytes.items()},
        memory={worker_of[worker]: steps for worker, steps in played.memory.items()},
    )


def _finish(plan: Plan, cluster: Cluster, parts: Sequence[Played], timeline: bool) -> MiniBatch:
    spans = sorted(
        (span for part in parts for span in part.spans), key=lambda span: (span[2], span[0], span[1])
    )
    ready_ns = [0] * plan.num_workers
    busy_ns = [0] * plan.num_workers
    for worker, _, start, stop in spans:
        ready_ns[worker] = max(ready_ns[worker], stop)
        busy_ns[worker] += stop - start
    pipeline_ns = max(ready_ns)
    closings: list[_Closed] = []
    ready_ns = list(map(max, ready_ns, _summed_ns(plan, cluster, spans, closings)))
    everyone = range(plan.num_workers)
    committed_ns = max(ready_ns) + cluster.allreduce_ns(COMMIT_BYTES, everyone)
    apply_ns = [cluster.apply_ns(worker, plan.ranges[worker]) for worker in everyone]
    for worker in everyone:
        closings.append((worker, ClosingKind.COMMIT, None, max(ready_ns), committed_ns))
        closings.append((worker, ClosingKind.UPDATE, None, committed_ns, committed_ns + apply_ns[worker]))
    end_ns = committed_ns + max(apply_ns) + to_ns(cluster.calibration.step_s)
    activations: dict[int, int] = {}
    for part in parts:
        activations |= part.peak_bytes
    return MiniBatch(
        time_s=end_ns / NS_PER_S,
        pipeline_s=pipeline_ns / NS_PER_S,
        busy_s=tuple((busy_ns[worker] + apply_ns[worker]) / NS_PER_S for worker in everyone),
        idle_s=tuple((end_ns - busy_ns[worker] - apply_ns[worker]) / NS_PER_S for worker in everyone),
        peak_bytes=tuple(
            _peak_bytes(plan, cluster, worker, activations.get(worker, 0)) for worker in everyone
        ),
        timeline=tuple(
            Span(worker, task, start / NS_PER_S, stop / NS_PER_S)
            for worker, task, start, stop in spans
            if timeline
        ),
        closings=tuple(
            Closing(worker, kind, section, start / NS_PER_S, stop / NS_PER_S)
            for worker, kind, section, start, stop in sorted(
                closings, key=lambda one: (one[3], one[4], one[0])
            )
            if timeline and stop > start
        ),
        memory=_memory(plan, cluster, parts, committed_ns, end_ns) if timeline else (),
    )


def _memory(
    plan: Plan, cluster: Cluster, parts: Sequence[Played], committed_ns: int, end_ns: int
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """What each worker holds over time: state and snapshot, the pipeline's, then that of the update."""
    held = {worker: steps for part in parts for worker, steps in part.memory.items()}
    result: list[tuple[tuple[float, int], ...]] = []
    for worker, span in enumerate(plan.ranges):
        lasting = _lasting_bytes(plan, cluster, worker)
        steps = {0: 0} | dict(held.get(worker, ()))  # of an instant, what it ends with
        steps |= {committed_ns: cluster.sizes.update(span), end_ns: 0}
        result.append(tuple((at_ns / NS_PER_S, lasting + size_bytes) for at_ns, size_bytes in steps.items()))
    return tuple(result)


def _peak_bytes(plan: Plan, cluster: Cluster, worker: int, pipeline_bytes: int) -> int:
    """State and snapshot, and the larger of what the pipeline and what the update needs."""
    lasting = _lasting_bytes(plan, cluster, worker)
    return lasting + max(pipeline_bytes, cluster.sizes.update(plan.ranges[worker]))


def _lasting_bytes(plan: Plan, cluster: Cluster, worker: int) -> int:
    sizes, span = cluster.sizes, plan.ranges[worker]
    hosts = [(section, len(plan.hosts(section))) for section in span.sections]
    return sizes.state(span) + sizes.snapshot(hosts)


_Closed = tuple[int, ClosingKind, int | None, int, int]  # a `Closing`, in nanoseconds


def _summed_ns(plan: Plan, cluster: Cluster, spans: Sequence[Timed], closings: list[_Closed]) -> list[int]:
    """When each worker has the last of its sums: of the losses, then of the gradients, sections descending.
    The sums go to `closings`.

    Each worker does them one after the other beside its operations. A sum begins when all hosts have come to
    it and have done their last backward of its section; the losses when all forwards at ends of paths are
    done.
    """
    losses_ns = max(stop for _, task, _, stop in spans if _is_last_forward(plan, task))
    everyone = range(plan.num_workers)
    tallied_ns = losses_ns + cluster.allreduce_ns(TALLY_BYTES * plan.num_micro_batches, everyone)
    closings += [(worker, ClosingKind.TALLY, None, losses_ns, tallied_ns) for worker in everyone]
    free_ns = [tallied_ns] * plan.num_workers
    ended_ns = _section_ends_ns(plan, cluster, spans)
    for section in reversed(range(plan.num_sections)):
        hosts = plan.hosts(section)
        if len(hosts) < 2:
            continue
        begin_ns = max(max(free_ns[host], ended_ns.get((host, section), 0)) for host in hosts)
        size_bytes = cluster.calibration.gradient_bytes[section]
        summed_ns = begin_ns + cluster.allreduce_ns(size_bytes, hosts)
        for host in hosts:
            free_ns[host] = summed_ns
            closings.append((host, ClosingKind.SUM, section, begin_ns, summed_ns))
    return free_ns


def _is_last_forward(plan: Plan, task: Operation) -> bool:
    return task.kind is Kind.FORWARD and task.stage + 1 == len(plan.path_of(task.micro_batch).hops)


def _section_ends_ns(plan: Plan, cluster: Cluster, spans: Sequence[Timed]) -> dict[tuple[int, int], int]:
    """When each worker has ended its last backward of each section; within an operation by their shares."""
    last: dict[tuple[int, Range], tuple[int, int]] = {}
    for worker, task, start, stop in spans:
        if task.kind is Kind.BACKWARD:
            last[worker, plan.path_of(task.micro_batch).hops[task.stage].range] = start, stop
    ended: dict[tuple[int, int], int] = {}
    for (worker, span), (start, stop) in last.items():
        for section, share in cluster.backward_shares(span):
            at = start + round((stop - start) * share)
            ended[worker, section] = max(at, ended.get((worker, section), 0))
    return ended
