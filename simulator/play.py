"""The pipelines of one component of a plan, played operation by operation with the workers' dispatcher."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ..pipeline import Component, Dispatcher, Hop, Kind, Operation, Orders, Plan, Range, output_of
from .calibration import Calibration, Link
from .engine import Engine, to_ns
from .sizes import Sizes, sizes_of


@dataclass(frozen=True)
class Cluster:
    """The machines that a plan runs on: what was measured, where each worker is, and how slow it is."""

    calibration: Calibration
    vm_of: tuple[str, ...]
    slowdown: tuple[float, ...]

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        sums: dict[str, list[float]] = {}
        for name in ("forward_s", "backward_s", "optimizer_s"):
            total = sums.setdefault(name, [0])
            for value in getattr(self.calibration, name):
                total.append(total[-1] + value)
        return sums

    def _total(self, name: str, span: Range) -> float:
        return self._sums[name][span.stop] - self._sums[name][span.start]

    def link(self, one: int, other: int) -> Link:
        return self.calibration.link(self.vm_of[one] == self.vm_of[other])

    def compute_ns(self, kind: Kind, hop: Hop) -> int:
        name = "backward_s" if kind is Kind.BACKWARD else "forward_s"
        own_s = self.calibration.operation_s
        return to_ns(self._total(name, hop.range) * self.slowdown[hop.worker] + own_s)

    def apply_ns(self, worker: int, span: Range) -> int:
        return to_ns(self._total("optimizer_s", span) * self.slowdown[worker])

    def backward_shares(self, span: Range) -> list[tuple[int, float]]:
        """(section, how much of the range's backward is over when the section's is), sections descending."""
        whole = self._total("backward_s", span)
        return [
            (section, self._total("backward_s", Range(section, span.stop)) / whole if whole else 1.0)
            for section in reversed(span.sections)
        ]

    def allreduce_ns(self, size_bytes: int, workers: Iterable[int]) -> int:
        members = list(workers)
        if len(members) < 2:
            return 0
        same_vm = len({self.vm_of[worker] for worker in members}) == 1
        ring_s = self.calibration.link(same_vm).allreduce_s(size_bytes, len(members))
        return to_ns(ring_s + self.calibration.collective_s)

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.calibration)

    def input_bytes(self, kind: Kind, span: Range) -> int:
        """Activations that enter a range from before it, or gradients that enter it from behind."""
        return self.sizes.inputs(span) if kind is Kind.FORWARD else self.sizes.gradients(span)


Timed = tuple[int, Operation, int, int]
"""(worker, operation, start, stop) in ns."""


@dataclass(slots=True)
class Played:
    """The operations in the order of stopping; each worker's peak beyond its state, and (ns, bytes) whenever
    that changes."""

    spans: list[Timed] = field(default_factory=list[Timed])
    peak_bytes: dict[int, int] = field(default_factory=dict[int, int])
    memory: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])


def play(plan: Plan, part: Component, orders: Orders, cluster: Cluster, draw: random.Random) -> Played:
    """Plays all micro-batches of a component to the end."""
    run = _Play(plan, part, orders, cluster, draw)
    for worker in part.workers:
        run.wake(worker)
    run.engine.run(run.happen)
    assert not any(dispatcher.remaining for dispatcher in run.dispatchers.values()), "the plan came to a halt"
    return run.played


@dataclass(frozen=True, slots=True)
class _Finished:
    worker: int
    operation: Operation
    start_ns: int


@dataclass(frozen=True, slots=True)
class _Arrived:
    worker: int
    operation: Operation


@dataclass(frozen=True, slots=True)
class _Woken:
    worker: int


class _Play:
    def __init__(
        self, plan: Plan, part: Component, orders: Orders, cluster: Cluster, draw: random.Random
    ) -> None:
        self.plan = plan
        self.cluster = cluster
        self.draw = draw
        self.engine = Engine[_Finished | _Arrived | _Woken]()
        self.dispatchers = {worker: Dispatcher(plan, worker, orders[worker]) for worker in part.workers}
        self.busy: set[int] = set()
        self.resident = dict.fromkeys(part.workers, 0)
        self.played = Played(
            peak_bytes=dict.fromkeys(part.workers, 0), memory={worker: [] for worker in part.workers}
        )
        self.wire_free: dict[tuple[int, int], int] = {}
        self.last_arrival: dict[tuple[int, int, Kind], int] = {}

    def hop(self, task: Operation) -> Hop:
        return self.plan.path_of(task.micro_batch).hops[task.stage]

    def start(self, worker: int) -> None:
        if worker in self.busy:
            return
        task = self.dispatchers[worker].next()
        if task is None:
            return
        self.busy.add(worker)
        self.hold(worker, self.running_bytes(worker, task))
        duration = self.cluster.compute_ns(task.kind, self.hop(task))
        self.engine.at(self.engine.now_ns + duration, _Finished(worker, task, self.engine.now_ns))

    def wake(self, worker: int) -> None:
        # Last at its instant: a worker chooses when all that ends or arrives just then is known.
        self.engine.at(self.engine.now_ns, _Woken(worker), priority=1)

    def happen(self, event: _Finished | _Arrived | _Woken) -> None:
        if isinstance(event, _Woken):
            self.start(event.worker)
            return
        worker, task = event.worker, event.operation
        if isinstance(event, _Finished):
            self.busy.discard(worker)
            self.played.spans.append((worker, task, event.start_ns, self.engine.now_ns))
            self.hold(worker, self.added_bytes(worker, task) - self.running_bytes(worker, task))
            if target := output_of(self.plan, task):
                self.send(worker, *target)
        else:
            self.hold(worker, self.cluster.input_bytes(task.kind, self.hop(task).range))
            self.dispatchers[worker].arrived(task)
        self.wake(worker)

    def send(self, worker: int, peer: int, fed: Operation) -> None:
        if peer == worker:
            self.hold(worker, self.cluster.input_bytes(fed.kind, self.hop(fed).range))
            self.dispatchers[worker].arrived(fed)
            return
        link = self.cluster.link(worker, peer)
        size_bytes = self.cluster.input_bytes(fed.kind, self.hop(fed).range)
        wire = (worker, peer)  # activations and gradients share it; the way back is another
        sent = max(self.engine.now_ns, self.wire_free.get(wire, 0)) + to_ns(link.occupied_s(size_bytes))
        self.wire_free[wire] = sent
        jitter_s = self.draw.expovariate(1 / link.jitter_s) if link.jitter_s else 0.0
        channel = (worker, peer, fed.kind)
        arrival = sent + to_ns(link.latency_s + jitter_s + self.cluster.calibration.message_s)
        arrival = max(arrival, self.last_arrival.get(channel, 0))  # a connection keeps its order
        self.last_arrival[channel] = arrival
        self.engine.at(arrival, _Arrived(peer, fed))

    def hold(self, worker: int, size_bytes: int) -> None:
        self.resident[worker] += size_bytes
        self.played.peak_bytes[worker] = max(self.played.peak_bytes[worker], self.resident[worker])
        self.played.memory[worker].append((self.engine.now_ns, self.resident[worker]))

    def recomputed(self, worker: int, task: Operation) -> bool:
        return self.dispatchers[worker].recomputes(task.micro_batch, task.stage)

    def running_bytes(self, worker: int, task: Operation) -> int:
        """What an operation holds while it runs, beyond what was there before."""
        sizes, span = self.cluster.sizes, self.hop(task).range
        if task.kind is Kind.BACKWARD:
            return sizes.backward_peak(span)
        if task.kind is Kind.FORWARD and self.recomputed(worker, task):
            return sizes.brief_forward_peak(span)
        return sizes.forward_peak(span)

    def added_bytes(self, worker: int, task: Operation) -> int:
        """By how much more is held after an operation than before it. Inputs stay until the backward."""
        sizes, span = self.cluster.sizes, self.hop(task).range
        if task.kind is Kind.BACKWARD:
            entered = sizes.inputs(span) + sizes.gradients(span)
            return -(sizes.kept(span) + sizes.batch(span) + entered)
        if task.kind is Kind.RECOMPUTE:
            return sizes.kept(span)
        return sizes.batch(span) + (0 if self.recomputed(worker, task) else sizes.kept(span))
