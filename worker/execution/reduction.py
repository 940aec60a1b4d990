"""All-reduces of a step, each started as soon as this worker's contribution is complete.

They run on the generation's thread for blocking calls while the compute thread runs other backwards. All
workers issue them in one global order: the losses, then the buckets, sections descending. They cannot
deadlock: no operation waits for an all-reduce, so all hosts eventually issue the first unfinished one.
Results are read only after `finish`, and nothing that outlives the attempt is changed before: a worker's own
sums stay as they are. What has one host is divided in `finish`, when the activations' memory is free again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Plan
from ..sections.grad_sums import Totals, mean_loss
from ..sections.ranges import RangeOutput
from .blocking import Future
from .buckets import Bucket
from .executor import Sink
from .gloo import ProcessGroup
from .in_flight import InFlight
from .partial_sums import PartialSum
from .session import Session
from .staging import Stager

_NO_PIECE = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BucketTotal:
    """A bucket's sums over all workers: gradients, and the buffers' values after the step."""

    bucket: Bucket
    gradients: Totals
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepTotals:
    loss: float
    has_all_losses: bool  # each micro-batch's piece was contributed once
    buckets: Sequence[BucketTotal]


@dataclass(frozen=True, slots=True)
class Expected:
    """What this worker's operations will hand in."""

    num_forwards: int
    backwards: Mapping[int, int]  # {section: number of its backwards that add to sums}

    @classmethod
    def of(cls, plan: Plan, order: Sequence[Operation]) -> Expected:
        """`plan`: a whole one, or the rest of a step; `order`: the worker's own."""
        backwards: Counter[int] = Counter()
        for task in order:
            if task.kind in (Kind.BACKWARD, Kind.WEIGHT):
                path = plan.path_of(task.micro_batch)
                backwards.update(filter(path.adds, path.hops[task.stage].range.sections))
        return cls(sum(task.kind is Kind.FORWARD for task in order), backwards)


class Reduction(Sink):
    """One worker's all-reduces, step after step: `begin` an attempt, add results of operations, `finish`."""

    def __init__(
        self,
        session: Session,
        buckets: Sequence[Bucket],
        in_flight: InFlight,
        num_micro_batches: int,
        device: torch.device,
    ) -> None:
        assert session.everyone is not None, "sums need the generation's groups"
        self._session = session
        self._everyone: ProcessGroup = session.everyone
        self._compute, self._courier = Stager(device), Stager(device)
        self._in_flight = in_flight
        self._own = [bucket for bucket in buckets if session.rank in bucket.hosts]
        self._bucket_of = {name: bucket.sections for bucket in self._own for name in bucket.names}
        self._buffers = [bucket for bucket in self._own if bucket.buffers]
        self._num_micro_batches = num_micro_batches
        self._losses: Future[tuple[float, float, bool]] | None = None
        self._totals: list[Future[tuple[BucketTotal, Any]] | None] = []
        """Of the own buckets, in order; None if this worker is the only host."""

    def begin(self, expected: Expected, loss_scale: float = 1.0) -> None:
        """Begin an attempt at the step in flight, or its rest."""
        self._loss_scale = loss_scale
        self.close()
        self._forwards_left = expected.num_forwards
        self._backwards_left = dict(expected.backwards)
        self._advance()

    def forwarded(self, micro_batch: int, output: RangeOutput) -> None:
        """Add a forward's updates of buffers, and its loss if it is the last of its path."""
        if output.updates:
            for bucket in self._buffers:
                self._in_flight.add_updates(bucket.sections, micro_batch, output.updates)
        if output.piece is not None:
            self._in_flight.add_loss(micro_batch, output.piece)
        self._forwards_left -= 1
        if not self._forwards_left:
            self._advance()

    def gradient(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter."""
        total = self._in_flight.parcels.adds(self._bucket_of[name], micro_batch, section)
        if total is not None:
            total.gradients.add(name, gradient)

    def section_done(self, micro_batch: int, section: int) -> None:
        """Note that a backward of `section` has added all its gradients."""
        self._in_flight.parcels.added(micro_batch, section)
        left = self._backwards_left[section] = self._backwards_left[section] - 1
        if not left:
            self._advance()

    def finish(self, idle: Callable[[Future[Any]], None]) -> StepTotals:
        """Wait for all sums. Calls `idle` while one is not complete. Raises the interrupt's cause, and
        `UserCodeError` if the weights of the losses add up to nothing."""
        assert self._losses is not None, "operations are left"
        assert len(self._totals) == len(self._own), "operations are left"
        courier = self._session.courier
        idle(self._losses)
        loss, weight, has_all_losses = courier.result(self._losses)
        totals: list[BucketTotal] = []
        for bucket, call in zip(self._own, self._totals, strict=True):
            if call is None:
                own = self._in_flight.parcels.sums()[bucket.sections]
                totals.append(self._total(bucket, own, weight, None))
                continue
            idle(call)
            total, moment = courier.result(call)
            self._compute.adopt([*total.gradients.gradients.values(), *total.buffers.values()], moment)
            totals.append(total)
        self.close()
        return StepTotals(loss, has_all_losses, totals)

    def close(self) -> None:
        """Drop the calls of the last step, which refer to this object, sums, session and results."""
        self._losses = None
        self._totals.clear()

    def _advance(self) -> None:
        """Start the next all-reduces in order, as far as this worker's contributions are complete."""
        courier = self._session.courier
        if self._losses is None and not self._forwards_left:
            # One worker contributes each micro-batch's row and the others zeros, so the sum is exact.
            pieces = self._in_flight.brought_losses()
            present = {number: (*piece, 1.0) for number, piece in pieces.items()}
            rows = [present.get(number, _NO_PIECE) for number in range(self._num_micro_batches)]
            table = torch.tensor(rows, dtype=torch.float64)
            self._losses = courier.start(partial(self._sum_losses, table))
        while self._losses is not None and len(self._totals) < len(self._own):
            bucket = self._own[len(self._totals)]
            if any(self._backwards_left.get(section) for section in bucket.sections):
                return
            if len(bucket.hosts) == 1:
                self._totals.append(None)
                continue
            own = self._in_flight.parcels.sums()[bucket.sections]
            run = partial(self._sum_bucket, bucket, own, self._losses, self._compute.moment())
            self._totals.append(courier.start(run))

    def _sum_losses(self, table: Tensor) -> tuple[float, float, bool]:
        """(loss, total weight, whether each piece was contributed once). `table`: a row for each micro-batch:
        its piece, and how often it was contributed."""
        self._everyone.sum(table)
        rows: list[list[float]] = table.tolist()
        if any(times != 1.0 for _, _, times in rows):
            return math.nan, 1.0, False
        return *mean_loss([(total, weight) for total, weight, _ in rows]), True

    def _sum_bucket(
        self, bucket: Bucket, own: PartialSum, losses: Future[tuple[float, float, bool]], computed: Any
    ) -> tuple[BucketTotal, Any]:
        """The bucket's totals and, for another thread, the moment when they are computed."""
        _, weight, _ = losses.result()
        over = _StagedAllReduce(self._session.hosts(bucket), self._courier)
        with self._courier.following(computed):
            total = self._total(bucket, own, weight, over)
            return total, self._courier.moment()

    def _total(
        self, bucket: Bucket, own: PartialSum, weight: float, over: _StagedAllReduce | None
    ) -> BucketTotal:
        gradients = own.gradients.totals(weight * self._loss_scale, over)
        return BucketTotal(bucket, gradients, own.running.finalise(over))


class _StagedAllReduce:
    def __init__(self, group: ProcessGroup, stager: Stager) -> None:
        self._group = group
        self._stager = stager

    def sum(self, tensor: Tensor) -> None:
        self._stager.reduce(tensor, self._group.sum)

    def max(self, tensor: Tensor) -> None:
        self._stager.reduce(tensor, self._group.max)
