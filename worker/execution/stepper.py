"""A step of training on one worker: operations, gradient sums, the commit, and the update of the weights.

How long it takes is predicted by `makara.simulator.minibatch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...model.data import Batches
from ...model.errors import WorkerError
from ...morphing.in_flight import StepId
from ...pipeline.contributions import whole_tally
from ...pipeline.plan import Plan, RestOfStep
from ...pipeline.traffic import own_part
from ...protocol.messages import At, Corruption, StepMetrics
from ..sections.grad_check import NonFiniteGradient, is_usable
from .blocking import Future, Interrupted
from .buckets import Bucket
from .commit import CommitRecord, Flag, Vote, tallies_of
from .executor import Executor, Work
from .gloo import ProcessGroup
from .p2p_channels import P2PChannels, values_of
from .prefetch import SOON_S, Prefetcher
from .reduction import Expected, Reduction, StepTotals
from .replicas import CorruptState, Differing, ReplicaCheck, compared_hosts, corruption_of, differing
from .session import Session
from .state import ModelState, Reduced

log = logging.getLogger("makara.stepper")

MOST_MISCOUNTS = 3
"""Attempts at a step whose sums do not hold each contribution once, before the trainer ends with an error."""


class Miscounted(WorkerError):
    """Attempt after attempt at a step, the sums do not hold each contribution exactly once."""


CommitRequest = Callable[[], tuple[int, Flag]]
"""Called at the end of a step; gives this worker's (newest generation that it may switch to, flags)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    record: CommitRecord
    settled: StepMetrics
    work: Work | None  # None if only the rest of the step was run: its operations are of other lengths


class Stepper:
    """The steps of one generation on one of its workers."""

    def __init__(
        self,
        session: Session,
        state: ModelState,
        batches: Batches,
        buckets: Sequence[Bucket],
        device: torch.device,
        on_miscount: Callable[[int, int], None] = lambda _step, _attempt: None,
    ) -> None:
        """`on_miscount(step, attempt)` is called where the sums of an attempt do not hold each contribution
        exactly once; `step` steps are committed before it."""
        assert session.trains, "a donor takes no step"
        assert session.everyone is not None, "steps need the generation's groups"
        self._session = session
        self._state = state
        self._everyone: ProcessGroup = session.everyone
        self._buckets = buckets
        self._device = device
        self._on_miscount = on_miscount
        plan = session.plan
        self._names = state.runtime.chain.trainable_names
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._whole_tallies = [whole_tally(bucket.sections, plan.num_micro_batches) for bucket in buckets]
        self._reduction = Reduction(session, buckets, state.in_flight, plan.num_micro_batches, device)
        self._progress = session.progress
        self._feed = Prefetcher(batches, progress=self._progress)
        compared = compared_hosts(plan, session.bits)
        sections = state.runtime.sections
        self.replicas = ReplicaCheck(sections, compared, session.rank, device, session.origins)
        self._whole: tuple[Executor, Expected] | None = None

    def step(self, ballot: CommitRequest) -> StepResult:
        """Take the next step, or the rest of it; it is committed and applied on return.

        If any rank votes for overflow of the fixed point, all ranks redo the step with other scales. With
        fp16 a non-finite gradient is committed too, and all ranks skip the update. If the sums do not hold
        each contribution exactly once, all redo the step, a few times. Raises `NonFiniteGradient` without
        loss scaling, `Miscounted`, and `Interrupted` before the commit is known, never after; `CorruptState`
        if hosts of a section differ.
        """
        began = time.monotonic()
        state, loss_scale = self._state, self._state.runtime.loss_scale
        step = state.applied
        assert step is not None
        self.replicas.begin(step)
        scales, attempt, rest, miscounts = state.scales(), 0, state.in_flight.rest, 0
        while True:
            state.runtime.discard()
            if rest is None:
                self._begin(StepId(step, state.branch, attempt), scales)
            work = self._run(step, rest)
            with self._progress.being(At.SUMS):
                totals = self._reduction.finish(self._use_idle)
            state.reduced = reduced = self._reduced(step, attempt, totals, began)
            record = self._commit(reduced, totals, ballot)
            if record.flags & Flag.MISCOUNT:
                miscounts += 1
                self._on_miscount(step, attempt)
                if miscounts == MOST_MISCOUNTS:
                    state.reduced = None
                    raise Miscounted(
                        f"step {step}: {miscounts} attempts did not add each micro-batch's gradients once"
                    )
            else:
                try:
                    usable = is_usable(step, self._names, record.norms, loss_scale)
                except NonFiniteGradient:
                    self._compare_all(step)  # before the user's code is blamed
                    raise
                if not usable or not record.flags & Flag.OVERFLOW:
                    break
                scales = reduced.scales
            state.reduced = None
            del totals, reduced  # their gradients are as large as the model
            attempt, rest = attempt + 1, None
        self.replicas.end()
        return StepResult(record, state.apply(record), work if rest is None else None)

    def _begin(self, of: StepId, scales: Mapping[str, float]) -> None:
        session = self._session
        num = session.plan.num_micro_batches
        state = self._state
        state.in_flight.begin(of, self._buckets, session.rank, num, scales, state.loss_scale)

    def _run(self, step: int, rest: RestOfStep | None) -> Work:
        """Run the operations of the whole step, or the rest of it."""
        if rest is None:
            self._whole = self._whole or self._operations(self._session.plan)
            executor, expected = self._whole
        else:
            executor, expected = self._operations(rest)
        try:
            self._reduction.begin(expected, self._state.loss_scale)
            return executor.run(step, self._reduction)
        finally:
            if rest is not None:
                executor.close()

    def _operations(self, plan: Plan) -> tuple[Executor, Expected]:
        """What runs this worker's operations of `plan`, and what they hand in."""
        session, runtime = self._session, self._state.runtime
        order, traffic = own_part(plan, session.rank)
        values = partial(values_of, plan, runtime.chain)
        lanes = P2PChannels(traffic, values, session.channels, session.interrupt, self._device)
        executor = Executor(plan, session.rank, order, runtime, lanes, self._feed, session.progress)
        return executor, Expected.of(plan, order)

    def close(self) -> None:
        if self._whole is not None:
            self._whole[0].close()
        self._reduction.close()
        self.replicas.close()

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
        own = self._state.in_flight.parcels.tallies()
        tallies = [own.get(bucket.sections, 0) for bucket in self._buckets] + self.replicas.terms()
        vote = Vote(rank, reduced.step, reduced.attempt, prepared, flags, norms, tallies)
        vector = torch.tensor(vote.vector(plan.num_workers, len(self._names)), dtype=torch.float64)
        outcome = self._session.courier.start(lambda: self._everyone.sum(vector))
        with self._progress.being(At.SUMS):
            self._use_idle(outcome)
            self._session.courier.result(outcome)
        self._progress.operations += 1
        summed: list[float] = vector.tolist()
        record = CommitRecord.from_vector(self._session.number, plan.num_workers, len(self._names), summed)
        found = tallies_of(summed, len(tallies))
        tallies, terms = found[: len(self._buckets)], found[len(self._buckets) :]
        if any(terms):
            raise self._corrupt(reduced.step, [section for section, term in enumerate(terms) if term])
        if not totals.has_all_losses or tallies != self._whole_tallies:
            log.error("step %d: the sums are not of each contribution once; the step is redone", reduced.step)
            return replace(record, flags=record.flags | Flag.MISCOUNT)
        return record

    def _compare_all(self, step: int) -> None:
        """Raise `CorruptState` if hosts of a section differ anywhere; all workers call it."""
        self.replicas.end()
        self.replicas.begin(step, whole=True)
        self.replicas.end()
        found = self._shown(f"all-hashes/{step}")
        if found:
            raise CorruptState(self._corruption(step, sorted(found), found))

    def _corrupt(self, step: int, sections: list[int]) -> CorruptState:
        """All workers know that hosts of these sections differ. Each shows its hashes, so that suspects can
        be named; should the generation end meanwhile, none is."""
        try:
            found = self._shown(f"hashes/{step}")
        except Interrupted:
            found = {}
        return CorruptState(self._corruption(step, sections, found))

    def _shown(self, name: str) -> Differing:
        """The sections whose hosts differ, by the newest hashes of all workers."""
        own = dict(self.replicas.hashes or {})
        shown = self._session.gather(name, own, self._session.plan.num_workers)
        hashes = [{int(section): value for section, value in one.items()} for one in shown]
        return differing(self.replicas.compared, hashes, self.replicas.origins)

    def _corruption(self, step: int, sections: list[int], found: Differing) -> Corruption:
        return corruption_of(self._session.number, step, sections, self._session.members, found)
