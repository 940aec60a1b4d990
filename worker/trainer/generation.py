"""Runs a generation on one worker, from forming to its end: form, step, save, and decide when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...checkpoint import open_store
from ...protocol.messages import At, JobSettings, Miscount, Phase, Recipe
from ..execution.blocking import PeersLost
from ..execution.buckets import buckets
from ..execution.commit import Flag
from ..execution.replicas import compared_hosts
from ..execution.session import Session
from ..execution.stepper import Stepper, StepResult
from ..recovery.joining import CheckpointLocation, join_generation
from ..recovery.room import free_bytes
from ..recovery.saver import CheckpointTarget, Saver
from .agent_pipe import AgentPipe
from .model import Model
from .snapshots import take_snapshot


def run_generation(
    session: Session,
    model: Model,
    job: JobSettings,
    recipe: Recipe,
    control: AgentPipe,
    may_switch: Callable[[], int],
) -> Phase | None:
    """Form the generation and train in it until all switch, hold, or the last step is published; returns the
    phase in which the worker is then: held, finished, left (a donor); None if all members switch to a newer
    generation.

    Raises `Interrupted` if it ends before that; the model's state is then that of the last settled commit.
    """

    def on_trouble(trouble: str) -> None:
        control.report(store_trouble=trouble)

    store = open_store(job.store.uri, endpoint=job.store.endpoint, region=job.store.region)
    model.state.runtime.discard()  # what a step that was cut off left, before memory is looked at
    session.rendezvous()
    parts = buckets(model.chain, session.plan)
    model.state.runtime.place_optimizers(on_host=session.plan.optimizer_on_host)
    place = CheckpointLocation(store, job.job, on_trouble)
    model.state.void_until = max(model.state.void_until, session.void_until)
    formed = join_generation(session, model.state, place, parts, lambda: free_bytes(model.device, job))
    if not session.trains:
        session.leave()  # before the report, after which the manager may end a VM that only hands over
    control.report(phase=Phase.RUNNING if session.trains else Phase.LEFT, formed=formed, step=formed.step)
    last = model.state.settled
    if last is not None and last.step == formed.step:
        control.metrics(last)  # again, as the worker that reported it may have died
    if not session.trains:
        return Phase.LEFT
    target = CheckpointTarget(
        store,
        job.job,
        session.number,
        model.chain.num_sections,
        job.global_batch_size,
        recipe.model_dump(mode="json"),
        session.members,
        compared_hosts(session.plan, session.bits),
        session.origins,
    )

    board = session.courier.call(session.board, [0])
    saver = Saver(
        target,
        session.rank,
        session.plan.num_workers,
        board,
        model.slot,
        on_published=lambda checkpoint: control.report(published=checkpoint),
        on_rendezvous_lost=lambda error: session.interrupt.trip(PeersLost([0], error)),
        on_trouble=on_trouble,
        on_fenced=lambda: control.report(fenced=session.number),
        progress=session.progress,
    )

    def on_miscount(step: int, attempt: int) -> None:
        control.report(miscount=Miscount(generation=session.number, step=step, attempt=attempt))

    stepper = Stepper(session, model.state, model.batches, parts, model.device, on_miscount)
    loop = _Loop(session, model, job, control, may_switch, saver, stepper)
    try:
        return loop.run(formed.step)
    finally:
        if loop.saved_at is not None and not saver.behind:
            model.state.saved_at = loop.saved_at
        saver.close()
        stepper.close()


class Due:
    """Decides whether to take a snapshot after a step. One that is due while a worker has no room is taken
    after the first step at which all have room."""

    def __init__(self, owed: bool) -> None:
        self._owed = owed

    def now(self, due: bool, flags: Flag) -> bool:
        """`due`: by the number of the step; `flags`: of its commit, the same on all workers."""
        self._owed = self._owed or due or bool(flags & Flag.SAVE)
        taken = bool(flags & Flag.HOLD) or (self._owed and not flags & Flag.BUSY)
        self._owed = self._owed and not taken
        return taken


class _Loop:
    """The steps of a formed generation."""

    def __init__(
        self,
        session: Session,
        model: Model,
        job: JobSettings,
        control: AgentPipe,
        may_switch: Callable[[], int],
        saver: Saver,
        stepper: Stepper,
    ) -> None:
        self._session = session
        self._model = model
        self._job = job
        self._control = control
        self._may_switch = may_switch
        self._saver = saver
        self._stepper = stepper
        self.saved_at: float | None = None  # monotonic time of the newest checkpoint of this generation
        # The period continues over generations, so that frequent morphs do not postpone checkpoints for ever.
        self._period_began = model.state.saved_at or time.monotonic()
        model.state.saved_at = self._period_began

    def run(self, step: int) -> Phase | None:
        # A snapshot that became due while the generation changed is taken after the first step. All members
        # know both numbers, so all decide alike.
        published = max((ref.step for ref in self._session.checkpoints if ref.step <= step), default=0)
        interval = self._job.checkpoint_interval_steps
        if self._session.saves_only and step < self._job.steps:
            if step > published:
                self._save(step)
                self._await_saved(step)
            return Phase.HELD
        due = Due(step < self._job.steps and interval is not None and step - published >= interval)
        while step < self._job.steps:
            result = self._stepper.step(self._ballot)
            step = result.record.step + 1
            self._tell(step, result)
            flags, last = result.record.flags, step == self._job.steps
            if last:
                break
            if due.now(interval is not None and step % interval == 0, flags):
                self._save(step)
            if flags & Flag.HOLD:
                self._await_saved(step)
                return Phase.HELD
            if result.record.prepared > self._session.number:
                return None
        self._save(step)
        self._await_saved(step)
        return Phase.FINISHED

    def _ballot(self) -> tuple[int, Flag]:
        orders = self._control.orders
        flags = Flag.HOLD if orders is not None and orders.hold else Flag(0)
        period_s = self._job.checkpoint_interval_s
        if period_s is not None and time.monotonic() - (self.saved_at or self._period_began) > period_s:
            flags |= Flag.SAVE
        if self._saver.slot_taken:
            flags |= Flag.BUSY
        return self._may_switch(), flags

    def _save(self, step: int) -> None:
        with self._session.progress.being(At.STORE):
            while self._saver.slot_taken:  # only before a hold, or the end
                self._session.courier.call(lambda: self._saver.wait(0.2))
        self.saved_at = time.monotonic()
        hashes = self._stepper.replicas.begin(step, whole=True)
        self._saver.save(take_snapshot(self._session, self._model, step), hashes)
        self._session.progress.operations += 1

    def _await_saved(self, step: int) -> None:
        """Wait until this rank's share of checkpoint `step` is stored, and on rank 0 until it is
        published."""
        with self._session.progress.being(At.STORE):
            while not self._saver.done(step):
                self._session.courier.call(lambda: self._saver.wait(0.2))

    def _tell(self, step: int, result: StepResult) -> None:
        work = result.work
        changes: dict[str, Any] = {
            "step": step,
            "forward_s": None if work is None else work.forward_s,
            "backward_s": None if work is None else work.backward_s,
        }
        self._control.report(**changes)
        # From both ends of the plan: a VM that dies while the manager is away takes its reports with it.
        if self._session.rank in (0, self._session.plan.num_workers - 1):
            self._control.metrics(result.settled)
