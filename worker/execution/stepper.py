"""A step of training on one worker: operations, gradient sums, the commit, and the update of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...model.data import Batches
from ...model.partition.partition import CutTensor
from ...pipeline.schedules import orders
from ...pipeline.traffic import Message, messages
from ...protocol.messages import At
from ..sections.grad_check import is_usable
from ..sections.grad_sums import mean_loss, norms_of
from .blocking import Future
from .buckets import Bucket
from .commit import CommitRecord, Flag, Vote
from .executor import Executor, Work, batches_of
from .gloo import ProcessGroup
from .p2p_channels import P2PChannels, values_of
from .prefetch import SOON_S, Prefetcher
from .reduction import Reduction
from .session import Session
from .state import AppliedStep, ModelState, Reduced

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
        all_orders = orders(plan)
        order = all_orders[rank]

        def values(message: Message) -> tuple[CutTensor, ...]:
            return values_of(plan, chain, message)

        self._reduction = Reduction(session, chain, buckets, order, numerics, device)
        self._sums = self._reduction.parts
        traffic = messages(plan, all_orders)[rank]
        self._lanes = P2PChannels(traffic, values, session.channels, session.interrupt, device)
        self._progress = session.progress
        self._feed = Prefetcher(batches, batches_of(plan, order, state.runtime), progress=self._progress)
        self._executor = Executor(plan, rank, order, state.runtime, self._lanes, self._feed, self._progress)

    def step(self, ballot: CommitRequest) -> StepResult:
        """Take the next step; it is committed and applied on return.

        If any rank votes for overflow of the fixed point, all ranks redo the step with other scales. With
        fp16 a non-finite gradient is committed too, and all ranks skip the update. Raises `NonFiniteGradient`
        without loss scaling, and `Interrupted` before the commit is known, never after.
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
            self._reduction.begin(scales)
            work = self._executor.run(step, self._reduction)
            with self._progress.being(At.SUMS):
                loss, weight = mean_loss(self._reduction.finish(self._use_idle))
            overflow = any(part.gradients.overflow() for part in self._sums)
            self._state.reduced = self._finalise(step, attempt, loss, weight, overflow, began)
            record = self._commit(step, attempt, overflow, ballot)
            usable = is_usable(step, self._names, record.norms, self._state.runtime.loss_scale)
            if not usable or not record.flags & Flag.OVERFLOW:
                break
            self._state.reduced = None
            scales = self._next_scales()
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

    def _finalise(
        self, step: int, attempt: int, loss: float, weight: float, overflow: bool, began: float
    ) -> Reduced:
        gradients: dict[str, torch.Tensor] = {}
        statistics: dict[str, torch.Tensor] = {}
        loss_scale = self._state.runtime.loss_scale
        divisor = weight if loss_scale is None else weight * loss_scale.scale
        if not overflow:
            for part in self._sums:
                gradients |= part.gradients.finalise(divisor)
                statistics |= part.running.finalise()
        return Reduced(
            step=step,
            generation=self._session.number,
            attempt=attempt,
            gradients=gradients,
            statistics=statistics,
            scales=self._next_scales(),
            loss=loss,
            began=began,
        )

    def _commit(self, step: int, attempt: int, overflow: bool, ballot: CommitRequest) -> CommitRecord:
        """Vote, once the reduced gradients are here, and return the outcome."""
        rank, plan = self._session.rank, self._session.plan
        assert self._state.reduced is not None
        norms = self._norms(self._state.reduced.gradients)
        prepared, flags = ballot()
        flags |= Flag.OVERFLOW if overflow else Flag(0)
        vote = Vote(rank, step, attempt, prepared, flags, norms)
        vector = torch.tensor(vote.vector(plan.num_workers, len(self._names)), dtype=torch.float64)
        outcome = self._session.courier.start(lambda: self._everyone.sum(vector))
        with self._progress.being(At.SUMS):
            self._use_idle(outcome)
            self._session.courier.result(outcome)
        self._progress.operations += 1
        return CommitRecord.from_vector(self._session.number, plan.num_workers, vector.tolist())

    def _norms(self, gradients: Mapping[str, torch.Tensor]) -> dict[int, float]:
        """{index of the parameter in the model: norm}, for those that this rank contributes."""
        return {
            self._rows[name]: norm
            for part in self._sums
            if part.bucket.norm_rank == self._session.rank
            for name, norm in norms_of(part.gradients, gradients).items()
        }

    def _next_scales(self) -> dict[str, float]:
        return {n: scale for part in self._sums for n, scale in part.gradients.next_scales().items()}
