"""All-reduces of a step, each started as soon as this worker's contribution is complete.

They run on the generation's thread for blocking calls while the compute thread runs other backwards. All
workers issue them in one global order: the losses, then the buckets, sections descending. They cannot
deadlock: no operation waits for an all-reduce, so all hosts eventually issue the first unfinished one.
Results are read only after `finish`, and nothing that outlives the attempt is changed before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...model.partition.partition import Sections
from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Plan
from ..sections.buffer_updates import RunningSum
from ..sections.grad_sums import GradientSum, new_sum
from ..sections.ranges import Piece, RangeOutput
from .blocking import Future
from .buckets import Bucket
from .executor import Sink
from .gloo import ProcessGroup
from .session import Session
from .staging import Staged, Stager

_NO_PIECE = Piece(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BucketSum:
    """A bucket with its sums."""

    bucket: Bucket
    gradients: GradientSum
    running: RunningSum


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
        self._sum_of = {name: part.gradients for part in self.parts for name in part.gradients.names}
        self._running = [part.running for part in self.parts if part.bucket.buffers]
        self._num_forwards = sum(task.kind is Kind.FORWARD for task in order)
        self._num_backwards = _backwards_of_sections(session.plan, order)
        self._num_micro_batches = num
        self._pieces: dict[int, Piece] = {}
        self._table = torch.zeros(0)
        self._started: list[Future[list[Staged]]] = []

    def begin(self, scales: Mapping[str, float]) -> None:
        """Begin an attempt at a step with these scales (see `GradientSum.reset`)."""
        for part in self.parts:
            part.gradients.reset(scales)
            part.running.reset()
        self._pieces.clear()
        self._started.clear()
        self._forwards_left = self._num_forwards
        self._backwards_left = dict(self._num_backwards)
        self._next = 0  # the next all-reduce in global order: 0 is the losses, then the buckets
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

    def gradient(self, section: int, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter."""
        self._sum_of[name].add(name, gradient)

    def section_done(self, section: int) -> None:
        """Note that a backward of `section` has added all its gradients."""
        left = self._backwards_left[section] = self._backwards_left[section] - 1
        if not left:
            self._advance()

    def finish(self, idle: Callable[[Future[Any]], None]) -> list[tuple[float, float]]:
        """Wait for all sums; returns every micro-batch's (loss sum, weight), in order.

        Calls `idle` while a sum is not complete. Raises the interrupt's cause.
        """
        assert self._next == len(self.parts) + 1, "operations are left"
        for call in self._started:
            idle(call)
            for staged in self._session.courier.result(call):
                self._compute.take(staged)
        return [(float(total), float(weight)) for total, weight in self._table.tolist()]

    def close(self) -> None:
        """Drop the calls of the last step, which refer to this object, and so to sums and session."""
        self._started.clear()

    def _advance(self) -> None:
        """Start the next all-reduces in order, as far as this worker's contributions are complete."""
        while self._next <= len(self.parts) and self._is_complete(self._next):
            if self._next == 0:
                # One worker contributes each micro-batch's row and the others zeros, so the sum is exact.
                rows = [self._pieces.get(number, _NO_PIECE) for number in range(self._num_micro_batches)]
                self._table = torch.tensor(rows, dtype=torch.float64)
                self._start([(self._table, self._everyone.sum)])
            else:
                self._start(self._collectives(self.parts[self._next - 1]))
            self._next += 1

    def _is_complete(self, number: int) -> bool:
        if number == 0:
            return not self._forwards_left
        sections = self.parts[number - 1].bucket.sections
        return not any(self._backwards_left.get(section) for section in sections)

    def _collectives(self, part: BucketSum) -> list[tuple[Tensor, Callable[[Tensor], None]]]:
        if len(part.bucket.hosts) == 1:
            return []
        group = self._session.hosts(part.bucket)
        summed = [(part.gradients.buffer, group.sum), (part.gradients.maxima, group.max)]
        summed += [(table, group.sum) for table in part.running.tensors]
        return [(tensor, collective) for tensor, collective in summed if tensor.numel()]

    def _start(self, collectives: Sequence[tuple[Tensor, Callable[[Tensor], None]]]) -> None:
        if not collectives:
            return
        marked = [(self._compute.mark(tensor), collective) for tensor, collective in collectives]

        def run() -> list[Staged]:
            return [self._courier.reduce(staged, collective) for staged, collective in marked]

        self._started.append(self._session.courier.start(run))


def _backwards_of_sections(plan: Plan, order: Sequence[Operation]) -> Counter[int]:
    """{section: number of its backwards that the worker runs in a step}."""
    count: Counter[int] = Counter()
    for task in order:
        if task.kind is Kind.BACKWARD:
            count.update(plan.path_of(task.micro_batch).hops[task.stage].range.sections)
    return count
