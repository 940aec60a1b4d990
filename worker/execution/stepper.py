"""A step of training on one worker: operations, gradient sums, the commit, and the update of the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ...model.data import Batches
from ...model.partition.partition import CutTensor
from ...pipeline.contributions import whole_tally
from ...pipeline.operations import Kind
from ...pipeline.traffic import Message, own_part
from ...protocol.messages import At
from ..sections.grad_check import is_usable
from .blocking import Future
from .buckets import Bucket
from .commit import CommitRecord, Flag, Vote, tallies_of
from .executor import Executor, Work, batches_of
from .gloo import ProcessGroup
from .p2p_channels import P2PChannels, values_of
from .prefetch import SOON_S, Prefetcher
from .reduction import Reduction, StepTotals
from .session import Session
from .state import AppliedStep, ModelState, Reduced

log = logging.getLogger("makara.stepper")

CommitRequest = Callable[[], tuple[int, Flag]]
"""Called at the end of a step; gives this worker's (newest generation that it may switch to, flags)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    record: CommitRecord
    settled: AppliedStep
    work: Work


class Stepper:
    """The steps of one generation on one of its workers."""

    def __init__(
        self,
        session: Session,
        state: ModelState,
        batches: Batches,
        buckets: Sequence[Bucket],
        numerics: Literal["exact", "fast"],
        device: torch.device,
    ) -> None:
        assert session.trains, "a donor takes no step"
        assert session.everyone is not None, "steps need the generation's groups"
        self._session = session
        self._state = state
        self._everyone: ProcessGroup = session.everyone
        chain, plan, rank = state.runtime.chain, session.plan, session.rank
        self._names = chain.trainable_names
        self._rows = {name: row for row, name in enumerate(self._names)}
        order, traffic = own_part(plan, rank)

        def values(message: Message) -> tuple[CutTensor, ...]:
            return values_of(plan, chain, message)

        self._whole_tallies = [whole_tally(bucket.sections, plan.num_micro_batches) for bucket in buckets]
        self._reduction = Reduction(session, chain, buckets, order, numerics, device)
        self._lanes = P2PChannels(traffic, values, session.channels, session.interrupt, device)
        self._progress = session.progress
        self._feed = Prefetcher(batches, batches_of(plan, order, state.runtime), progress=self._progress)
        self._executor = Executor(plan, rank, order, state.runtime, self._lanes, self._feed, self._progress)

    def step(self, ballot: CommitRequest) -> StepResult:
        """Take the next step; it is committed and applied on return.

        If any rank votes for overflow of the fixed point, all ranks redo the step with other scales. With
        fp16 a non-finite gradient is committed too, and all ranks skip the update. If the sums do not hold
        each contribution exactly once, all redo the step. Raises `NonFiniteGradient` without loss scaling,
        and `Interrupted` before the commit is known, never after.
        """
        began = time.monotonic()
        step = self._state.applied
        assert step is not None
        scales = {
            n: s for section in self._state.runtime.sections.values() for n, s in section.scales.items()
        }
        attempt = 0
        while True:
            self._state.runtime.discard()
            loss_scale = self._state.runtime.loss_scale
            self._reduction.begin(scales, 1.0 if loss_scale is None else loss_scale.scale)
            work = self._executor.run(step, self._reduction)
            with self._progress.being(At.SUMS):
                totals = self._reduction.finish(self._use_idle)
            self._state.reduced = reduced = self._reduced(step, attempt, totals, began)
            record = self._commit(reduced, totals, ballot)
            if not record.flags & Flag.MISCOUNT:
                usable = is_usable(step, self._names, record.norms, loss_scale)
                if not usable or not record.flags & Flag.OVERFLOW:
                    break
                scales = reduced.scales
            self._state.reduced = None
            attempt += 1
        return StepResult(record, self._state.apply(record), work)

    def close(self) -> None:
        self._lanes.close()
        self._reduction.close()

    def _use_idle(self, call: Future[Any]) -> None:
        """Load samples of the next step while a sum is not complete."""
        self._session.interrupt.wait_for(lambda: call.done, SOON_S)
        while not call.done and self._feed.load_ahead():
            self._session.interrupt.check()

    def _reduced(self, step: int, attempt: int, totals: StepTotals, began: float) -> Reduced:
        overflowed = any(total.gradients.overflowed for total in totals.buckets)
        gradients = {n: g for total in totals.buckets for n, g in total.gradients.gradients.items()}
        statistics = {n: value for total in totals.buckets for n, value in total.buffers.items()}
        return Reduced(
            step=step,
            generation=self._session.number,
            attempt=attempt,
            gradients={} if overflowed else gradients,
            statistics={} if overflowed else statistics,
            scales={n: scale for total in totals.buckets for n, scale in total.gradients.scales.items()},
            loss=totals.loss,
            began=began,
        )

    def _commit(self, reduced: Reduced, totals: StepTotals, ballot: CommitRequest) -> CommitRecord:
        """Vote, once the reduced gradients are here, and return the outcome."""
        rank, plan = self._session.rank, self._session.plan
        prepared, flags = ballot()
        if any(total.gradients.overflowed for total in totals.buckets):
            flags |= Flag.OVERFLOW
        norms = {
            self._rows[name]: norm
            for total in totals.buckets
            if total.bucket.norm_rank == rank
            for name, norm in total.gradients.norms().items()
        }
        tallies = self._reduction.tallies
        vote = Vote(rank, reduced.step, reduced.attempt, prepared, flags, norms, tallies)
        vector = torch.tensor(vote.vector(plan.num_workers, len(self._names)), dtype=torch.float64)
        outcome = self._session.courier.start(lambda: self._everyone.sum(vector))
        with self._progress.being(At.SUMS):
            self._use_idle(outcome)
            self._session.courier.result(outcome)
        self._progress.operations += 1
        summed: list[float] = vector.tolist()
        record = CommitRecord.from_vector(self._session.number, plan.num_workers, len(self._names), summed)
        if tallies_of(summed, len(tallies)) != self._whole_tallies:
            log.error("step %d: the sums are not of each contribution once; the step is redone", reduced.step)
            return replace(record, flags=record.flags | Flag.MISCOUNT)
        return record


def mean_seconds(work: Work) -> tuple[float | None, float | None]:
    """(forward, backward) mean seconds of a micro-batch on this worker, to detect slow machines."""
    count = work.counts[Kind.BACKWARD] + work.counts[Kind.INPUT]
    spent_s = sum(work.seconds[kind] for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
    return work.mean_s(Kind.FORWARD), spent_s / count if count else None
