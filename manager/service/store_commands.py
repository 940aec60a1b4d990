"""Carries out commands on a job's store: its head, its checkpoints, its export, its cleanup.

Commands that a job depends on (opening its head, exporting its weights, copying its first checkpoint) are
retried while the store is unavailable, and for a while if it, or this machine's disk, refuses; then the job
waits for a person. All others are housekeeping: retried whatever the store says, and no job depends on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from ...checkpoint import (
    CheckpointError,
    Corrupt,
    Export,
    Fenced,
    Head,
    HeadAhead,
    HeadLacks,
    HeadMissing,
    Incomplete,
    NoReadable,
    NotFound,
    Store,
    StoreRefused,
    StoreUnavailable,
    Swept,
    candidates,
    copy_checkpoint,
    delete_parts,
    discard_copies,
    export,
    open_generation,
    read_head,
    restart_generation,
    retire,
    save_calibration,
    sweep,
)
from ...protocol.messages import CheckpointRef
from ...simulator import Measurements
from ..core.commands import (
    Command,
    CopyCheckpoint,
    DeleteCheckpoint,
    ExportWeights,
    OpenHead,
    StoreCalibration,
    SweepStore,
)
from ..core.events import (
    CheckpointCopied,
    CheckpointDeleted,
    CommandStuck,
    Event,
    HeadDiffers,
    HeadOpened,
    HeadSeen,
    WeightsExported,
)
from ..core.state import JobState
from ..core.strikes.table import Kind
from ..spec.start_source import StartSource
from .retrying import Persist

log = logging.getLogger("makara.manager")
T = TypeVar("T")

HOUSEKEEPING = (DeleteCheckpoint, StoreCalibration, SweepStore)
_REFUSALS = (StoreRefused, OSError)  # OSError: this machine's disk is full, for example
_SWEEP_PATIENCE_S = 3600.0  # the next one finds the same

StoreCommand = OpenHead | DeleteCheckpoint | SweepStore | ExportWeights | CopyCheckpoint | StoreCalibration


class _Refused(Exception):
    """The store or the system refuses, but not yet for long enough to give up."""


@dataclass(kw_only=True, eq=False)
class StoreCommands:
    """Carries out store commands; each is idempotent. `clock` gives Unix seconds."""

    scratch: Path
    open_store: Callable[[str], Store]
    open_source: Callable[[str, StartSource], Store]
    state_of: Callable[[str], JobState]
    persist: Persist
    clock: Callable[[], float]
    patience_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        # By job: its exports and deletions, and the copy of its first checkpoint.
        self.exports: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.copies: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carry_out(self, job: str, command: StoreCommand) -> Event | None:
        """Carry out `command`; returns its event, or None."""
        match command:
            case OpenHead():
                return await self._or_stuck(command, self._open_head(job, command))
            case DeleteCheckpoint():
                return await self._delete(job, command)
            case SweepStore():
                return await self._sweep(job, command)
            case ExportWeights():
                return await self._or_stuck(command, self._export(job, command))
            case CopyCheckpoint():
                return await self._or_stuck(command, self._copy(job, command))
            case StoreCalibration():
                return await self._store_calibration(job, command)

    async def _open_head(self, job: str, command: OpenHead) -> Event:
        def opened(store: Store) -> Head:
            generation, opener = command.generation, command.opener
            if command.restart:
                return restart_generation(store, job, generation, now=self.clock(), opener=opener)
            return open_generation(
                store,
                job,
                generation,
                opener=opener,
                opened=command.opened,
                tried=command.tried,
                known=command.checkpoints,
            )

        try:
            head = await self._insist(job, command, opened)
        except HeadMissing as error:
            return self._differs(command, "missing", str(error), None)
        except (HeadAhead, HeadLacks, Fenced) as error:
            return await self._found_other(job, command, error)
        return HeadOpened(now=self.clock(), generation=command.generation, checkpoints=candidates(head))

    async def _found_other(self, job: str, command: OpenHead, error: HeadAhead | HeadLacks | Fenced) -> Event:
        found = await self._insist(job, command, lambda store: read_head(store, job))
        if isinstance(error, HeadLacks):
            return self._differs(command, "lacks", str(error), found)
        reason = str(error)
        if isinstance(error, Fenced):
            reason = (
                f"head.json is open at generation {error.open_generation}, beyond what this manager's "
                "journal knows of: another manager opened it, or the journal is from a backup"
            )
        return self._differs(command, "ahead", reason, found)

    def _differs(
        self,
        command: OpenHead,
        difference: Literal["missing", "lacks", "ahead"],
        reason: str,
        head: Head | None,
    ) -> Event:
        return HeadDiffers(
            now=self.clock(),
            generation=command.generation,
            difference=difference,
            reason=reason,
            head_generation=head.generation if head is not None else 0,
            checkpoints=candidates(head) if head is not None else (),
        )

    async def _or_stuck(self, command: Command, work: Awaitable[Event]) -> Event:
        """Await `work`. A lasting refusal, and what only a person can settle, becomes `CommandStuck`."""
        try:
            return await work
        except (*_REFUSALS, Corrupt, HeadAhead, NoReadable) as error:
            return self._stuck(command, str(error))

    def _stuck(self, command: Command, error: str) -> Event:
        generation = command.generation if isinstance(command, OpenHead) else None
        return CommandStuck(now=self.clock(), command=command.command, error=error, generation=generation)

    async def _delete(self, job: str, command: DeleteCheckpoint) -> Event:
        checkpoint = command.checkpoint
        # A base is kept only until the next generation opens: then the retirement goes through.
        await self._keep_house(job, command, lambda store: retire(store, job, checkpoint, now=self.clock()))
        # The lease counts from now, not from the decision: manager or store may have been away since, and
        # the previous manager's clock may have differed.
        await self.sleep(command.lease_s)
        # An export that began before may still read the parts.
        alone = self.exports[job]
        await self._keep_house(job, command, lambda store: delete_parts(store, job, checkpoint), alone=alone)
        return CheckpointDeleted(now=self.clock(), checkpoint=command.checkpoint)

    async def _sweep(self, job: str, command: SweepStore) -> Event | None:
        await self.sleep(max(0.0, command.not_before - self.clock()))
        state = self.state_of(job)
        ended = state.ended is not None
        kept = state.published if ended else (*state.published, state.base)
        newest_retired = state.retired

        def swept(store: Store) -> Swept | None:
            return sweep(
                store,
                job,
                now=self.clock(),
                lease_s=command.lease_s,
                opened=state.head_generation,
                unwanted=lambda found: found not in kept and found.age_rank <= newest_retired,
                exporting=state.finished is not None and not ended,
                ended=ended,
            )

        give_up_at = self.clock() + _SWEEP_PATIENCE_S
        keep_house = partial(self._keep_house, job, command, wanted=lambda: self.clock() < give_up_at)
        if state.copying:
            discarded = await keep_house(lambda store: discard_copies(store, job), alone=self.copies[job])
            _log_removed(job, {"parts of copies that failed": discarded})
        found = await keep_house(swept, alone=self.exports[job])
        if found is None:
            log.warning("job %s: its head is missing or somebody else's: nothing was swept", job)
            return None
        removed: dict[str, Sequence[object]] = {
            "checkpoints that had left the head": found.deleted,
            "checkpoints that were never published": found.orphans,
            "unfinished exports, by step": found.exports,
        }
        _log_removed(job, removed, found.aborted)
        return HeadSeen(
            now=self.clock(),
            generation=found.head.generation,
            checkpoints=candidates(found.head),
            leaving=len(found.head.retired),
        )

    async def _export(self, job: str, command: ExportWeights) -> Event:
        def write(store: Store, checkpoint: CheckpointRef) -> Export:
            self.scratch.mkdir(parents=True, exist_ok=True)
            return export(store, job, checkpoint, scratch=self.scratch)

        faults: list[str] = []
        for checkpoint in (command.checkpoint, *command.older):
            try:
                async with self.exports[job]:
                    done = await self._insist(job, command, partial(write, checkpoint=checkpoint))
            except (Corrupt, NotFound, Incomplete) as error:
                log.warning("job %s: checkpoint %s cannot be exported: %s", job, checkpoint, error)
                faults.append(f"checkpoint {checkpoint} cannot be read: {error}")
                continue
            note = "; ".join(faults)
            return WeightsExported(
                now=self.clock(), uri=done.uri, sha256=done.sha256, step=done.step, note=note
            )
        return self._stuck(command, "; ".join(faults))

    async def _copy(self, job: str, command: CopyCheckpoint) -> Event:
        source, spec = command.source, self.state_of(job).spec
        assert spec is not None, "only a submitted job starts from something"

        skipped: dict[CheckpointRef, str] = {}

        def copied(store: Store) -> tuple[CheckpointRef, CheckpointRef | None]:
            self.scratch.mkdir(parents=True, exist_ok=True)
            return copy_checkpoint(
                self.open_source(job, source),
                source.job,
                store,
                job,
                step=source.step,
                below=spec.training.steps,
                scratch=self.scratch,
                on_skip=skipped.__setitem__,
            )

        own, other = await self._insist(job, command, copied, alone=self.copies[job])
        why = "; ".join(f"checkpoint of step {found.step}: {reason}" for found, reason in skipped.items())
        return CheckpointCopied(now=self.clock(), checkpoint=own, source=other, skipped=why)

    async def _store_calibration(self, job: str, command: StoreCalibration) -> None:
        """Store a calibration. A refusal does not affect this job; a later one has to measure again."""
        state = self.state_of(job)
        assert state.measurements is not None, "it follows measurements"
        measured = Measurements.from_json(state.measurements)
        if measured.basis is None:
            return
        fingerprint, text = measured.basis.fingerprint, measured.to_text()
        await self._keep_house(job, command, lambda store: save_calibration(store, fingerprint, text))

    # ---- trying again --------------------------------------------------------------------------------------

    async def _insist(
        self, job: str, command: Command, call: Callable[[Store], T], *, alone: asyncio.Lock | None = None
    ) -> T:
        """Call with the job's store; retry while it is unavailable, and for `store_patience_s` while it or
        this machine refuses.

        The store is opened again each time, so that replaced credentials are found.
        """
        give_up_at = self.clock() + self.patience_s

        def attempt() -> T:
            try:
                return call(self.open_store(job))
            except _REFUSALS as error:
                if self.clock() >= give_up_at:
                    raise
                raise _Refused(str(error)) from error

        return await self.persist(job, command, attempt, StoreUnavailable, _Refused, alone=alone)

    async def _keep_house(
        self,
        job: str,
        command: Command,
        call: Callable[[Store], T],
        *,
        wanted: Callable[[], bool] | None = None,
        alone: asyncio.Lock | None = None,
    ) -> T:
        """Call with the job's store, and retry whatever the store says; no job depends on it."""
        return await self.persist(
            job,
            command,
            lambda: call(self.open_store(job)),
            CheckpointError,
            wanted=wanted,
            kind=Kind.HOUSEKEEPING,
            alone=alone,
        )


def _log_removed(job: str, removed: Mapping[str, Sequence[object]], num_aborted: int = 0) -> None:
    """Tell an operator what a sweep removed; nothing, if it removed nothing."""
    told = [f"{what}: {', '.join(map(str, which))}" for what, which in removed.items() if which]
    if num_aborted:
        told.append(f"{num_aborted} uploads that never ended")
    if told:
        log.info("job %s: a sweep removed %s", job, "; ".join(told))
