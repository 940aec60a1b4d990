"""All-reduces of a step, each started as soon as this worker's contribution is complete.

They run on the generation's thread for blocking calls while the compute thread runs other backwards. All
workers issue them in one global order: the losses, then the buckets, sections descending. They cannot
deadlock: no operation waits for an all-reduce, so all hosts eventually issue the first unfinished one.
Results are read only after `finish`, and nothing that outlives the attempt is changed before: a worker's own
sums stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...model.partition.partition import Sections
from ...pipeline.contributions import WORD, pair_hash
from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Plan
from ..sections.buffer_updates import RunningSum
from ..sections.grad_sums import GradientSum, Totals, mean_loss, new_sum
from ..sections.ranges import Piece, RangeOutput
from .blocking import Future
from .buckets import Bucket
from .executor import Sink
from .gloo import ProcessGroup
from .session import Session
from .staging import Stager

_NO_PIECE = Piece(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BucketSum:
    """A bucket with this worker's sums."""

    bucket: Bucket
    gradients: GradientSum
    running: RunningSum


@dataclass(frozen=True, slots=True)
class BucketTotal:
    """A bucket's sums over all workers: gradients, and the buffers' values after the step."""

    bucket: Bucket
    gradients: Totals
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepTotals:
    loss: float
    buckets: Sequence[BucketTotal]


class Reduction(Sink):
    """One worker's all-reduces, step after step: `begin` an attempt, add results of operations, `finish`."""

    def __init__(
        self,
        session: Session,
        chain: Sections,
        buckets: Sequence[Bucket],
        order: Sequence[Operation],
        numerics: Literal["exact", "fast"],
        device: torch.device,
    ) -> None:
        assert session.everyone is not None, "sums need the generation's groups"
        num = session.plan.num_micro_batches
        self._session = session
        self._everyone: ProcessGroup = session.everyone
        self._compute, self._courier = Stager(device), Stager(device)
        self.parts = [
            BucketSum(
                bucket,
                new_sum(chain, bucket.names, num, numerics, device),
                RunningSum({name: chain.traced.tensors[name] for name in bucket.buffers}, num, device),
            )
            for bucket in buckets
            if session.rank in bucket.hosts
        ]
        self.tallies = [0] * len(buckets)
        """Of this worker's part of each bucket, see `pipeline.contributions`."""
        self._places = _places(buckets, [part.bucket for part in self.parts])
        self._sum_of = {name: part.gradients for part in self.parts for name in part.gradients.names}
        self._running = [part.running for part in self.parts if part.bucket.buffers]
        self._num_forwards = sum(task.kind is Kind.FORWARD for task in order)
        self._num_backwards = _backwards_of_sections(session.plan, order)
        self._num_micro_batches = num
        self._pieces: dict[int, Piece] = {}
        self._losses: Future[tuple[float, float]] | None = None
        self._totals: list[Future[tuple[BucketTotal, Any]]] = []

    def begin(self, scales: Mapping[str, float], loss_scale: float = 1.0) -> None:
        """Begin an attempt at a step with these scales (see `GradientSum.reset`)."""
        self._loss_scale = loss_scale
        for part in self.parts:
            part.gradients.reset(scales)
            part.running.reset()
        self.tallies = [0] * len(self.tallies)
        self._pieces.clear()
        self.close()
        self._forwards_left = self._num_forwards
        self._backwards_left = dict(self._num_backwards)
        self._advance()

    def forwarded(self, micro_batch: int, output: RangeOutput) -> None:
        """Add a forward's updates of buffers, and its loss if it is the last of its path."""
        if output.updates:
            for running in self._running:
                running.add(micro_batch, output.updates)
        if output.piece is not None:
            self._pieces[micro_batch] = output.piece
        self._forwards_left -= 1
        if not self._forwards_left:
            self._advance()

    def gradient(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter."""
        self._sum_of[name].add(name, gradient)

    def section_done(self, micro_batch: int, section: int) -> None:
        """Note that a backward of `section` has added all its gradients."""
        for place in self._places.get(section, ()):
            self.tallies[place] = (self.tallies[place] + pair_hash(micro_batch, section)) & WORD
        left = self._backwards_left[section] = self._backwards_left[section] - 1
        if not left:
            self._advance()

    def finish(self, idle: Callable[[Future[Any]], None]) -> StepTotals:
        """Wait for all sums. Calls `idle` while one is not complete. Raises the interrupt's cause, and
        `UserCodeError` if the weights of the losses add up to nothing."""
        assert self._losses is not None, "operations are left"
        assert len(self._totals) == len(self.parts), "operations are left"
        courier = self._session.courier
        idle(self._losses)
        loss, _ = courier.result(self._losses)
        totals: list[BucketTotal] = []
        for call in self._totals:
            idle(call)
            total, moment = courier.result(call)
            self._compute.adopt([*total.gradients.gradients.values(), *total.buffers.values()], moment)
            totals.append(total)
        return StepTotals(loss, totals)

    def close(self) -> None:
        """Drop the calls of the last step, which refer to this object, and so to sums and session."""
        self._losses = None
        self._totals.clear()

    def _advance(self) -> None:
        """Start the next all-reduces in order, as far as this worker's contributions are complete."""
        courier = self._session.courier
        if self._losses is None and not self._forwards_left:
            # One worker contributes each micro-batch's row and the others zeros, so the sum is exact.
            rows = [self._pieces.get(number, _NO_PIECE) for number in range(self._num_micro_batches)]
            table = torch.tensor(rows, dtype=torch.float64)
            self._losses = courier.start(partial(self._sum_losses, table))
        while self._losses is not None and len(self._totals) < len(self.parts):
            part = self.parts[len(self._totals)]
            if not self._is_complete(part.bucket):
                return
            run = partial(self._sum_bucket, part, self._losses, self._compute.moment())
            self._totals.append(courier.start(run))

    def _is_complete(self, bucket: Bucket) -> bool:
        return not any(self._backwards_left.get(section) for section in bucket.sections)

    def _sum_losses(self, table: Tensor) -> tuple[float, float]:
        """(loss, total weight)."""
        self._everyone.sum(table)
        return mean_loss([(float(total), float(weight)) for total, weight in table.tolist()])

    def _sum_bucket(
        self, part: BucketSum, losses: Future[tuple[float, float]], computed: Any
    ) -> tuple[BucketTotal, Any]:
        """The bucket's totals and, for another thread, the moment when they are computed."""
        _, weight = losses.result()
        over = None
        if len(part.bucket.hosts) > 1:
            over = _StagedAllReduce(self._session.hosts(part.bucket), self._courier)
        with self._courier.following(computed):
            gradients = part.gradients.totals(weight * self._loss_scale, over)
            total = BucketTotal(part.bucket, gradients, part.running.finalise(over))
            return total, self._courier.moment()


class _StagedAllReduce:
    def __init__(self, group: ProcessGroup, stager: Stager) -> None:
        self._group = group
        self._stager = stager

    def sum(self, tensor: Tensor) -> None:
        self._stager.reduce(tensor, self._group.sum)

    def max(self, tensor: Tensor) -> None:
        self._stager.reduce(tensor, self._group.max)


def _places(buckets: Sequence[Bucket], own: Sequence[Bucket]) -> dict[int, list[int]]:
    """{section: the places among all buckets of those of this worker that have a part from it}."""
    places: dict[int, list[int]] = {}
    for place, bucket in enumerate(buckets):
        for section in bucket.sections if bucket in own else ():
            places.setdefault(section, []).append(place)
    return places


def _backwards_of_sections(plan: Plan, order: Sequence[Operation]) -> Counter[int]:
    """{section: number of its backwards that the worker runs in a step}."""
    count: Counter[int] = Counter()
    for task in order:
        if task.kind in (Kind.BACKWARD, Kind.WEIGHT):
            count.update(plan.path_of(task.micro_batch).hops[task.stage].range.sections)
    return count
