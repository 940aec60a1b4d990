"""Writes and publishes checkpoints of one generation in the background.

Every host of a section stores its share of the section's tensors and puts the receipts into the generation's
rendezvous store, with hashes of all of its sections; rank 0 collects them and publishes, if hosts of each
section have the same hash. A trainer holds one snapshot at a time, as the planner
assumes: until it is stored, no other is taken, and training continues. Calls that the store refuses are
retried as long as the generation lives, and reported.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ...checkpoint import (
    Cancelled,
    Corrupt,
    Fenced,
    HeadCorrupt,
    NotFound,
    Receipt,
    StoreUnavailable,
    assemble,
    publish,
    retrying,
    write_part,
)
from ...checkpoint import Store as CheckpointStore
from ...checkpoint.tensors import pack
from ...protocol.messages import CheckpointRef
from ..execution.gloo import CONNECTION_LOST, Store
from ..execution.replicas import Compared, CorruptState, Hashes, Origins, corruption_of, differing
from ..progress import ProgressCounters
from .store_trouble import StoreTrouble

log = logging.getLogger("makara.saver")
T = TypeVar("T")

_POLL_S = 0.05


class SnapshotSlot:
    """Room for one snapshot over all generations of a trainer: an abandoned upload may still hold it."""

    def __init__(self) -> None:
        self.taken = False


@dataclass(frozen=True)
class PartSnapshot:
    """This worker's share of one section, copied to host memory."""

    section: int
    part: int
    num_parts: int
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, int | float | bool | str]  # of the whole section, the same in every part


@dataclass(frozen=True)
class Snapshot:
    step: int  # number of steps committed
    parts: tuple[PartSnapshot, ...]


@dataclass(frozen=True)
class CheckpointTarget:
    """Where a generation's checkpoints are stored, and what their manifests say."""

    store: CheckpointStore
    job: str
    generation: int
    num_sections: int
    global_batch_size: int
    recipe: Mapping[str, Any]
    members: Sequence[str] = ()
    compared: Compared = field(default_factory=dict[int, Sequence[Sequence[int]]])
    """Hosts whose hashes of a section must be equal."""
    origins: Origins = ()


def share(names: Sequence[str], sizes: Mapping[str, int], part: int, num_parts: int) -> list[str]:
    """The names of `part`, if the ordered names are divided into `num_parts` runs of nearly equal bytes."""
    total = sum(sizes[name] for name in names)
    chosen: list[str] = []
    before = 0
    for name in names:
        middle = before + sizes[name] / 2
        if min(num_parts - 1, int(middle * num_parts / max(1, total))) == part:
            chosen.append(name)
        before += sizes[name]
    return chosen


class Saver:
    """Saves checkpoints. Owned by the compute thread; its own thread uploads, and on rank 0 publishes."""

    def __init__(
        self,
        place: CheckpointTarget,
        rank: int,
        num_ranks: int,
        board: Store,
        slot: SnapshotSlot,
        on_published: Callable[[CheckpointRef], None],
        on_rendezvous_lost: Callable[[Exception], None],
        on_trouble: Callable[[str], None],
        on_fenced: Callable[[], None],
        progress: ProgressCounters | None = None,
    ) -> None:
        """`on_rendezvous_lost`: called if the rendezvous store is lost, without which nothing is published.
        `on_trouble`: gets the object store's message while calls are retried; empty when that is over.
        `on_fenced`: called if the head is open for another generation, so that saving has ended."""
        self._place = place
        self._rank = rank
        self._num_ranks = num_ranks
        self._board = board
        self._slot = slot
        self._on_published = on_published
        self._on_rendezvous_lost = on_rendezvous_lost
        self._on_fenced = on_fenced
        self._progress = progress or ProgressCounters()
        self._trouble = StoreTrouble("saving a checkpoint", on_trouble)
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._hashes: dict[int, Future[Hashes | None]] = {}  # of steps that are not stored yet
        self._stored: list[int] = []  # on rank 0: steps whose own parts are stored, not yet published
        self._newest = -1  # step of the newest queued snapshot
        self._done = -1  # newest step for which this rank has done its share
        self._lost: dict[int, Exception] = {}  # {step that cannot be published any more: why}
        self._cancel = threading.Event()  # set when the current upload is not needed any more
        self._closed = False
        self._over = False  # the thread has ended, or is about to: nothing is stored any more
        self._error: Exception | None = None
        threading.Thread(target=self._loop, name="saver", daemon=True).start()

    @property
    def slot_taken(self) -> bool:
        """Whether a snapshot is still in memory, so that there is no room for another. Raises the error that
        ended saving."""
        if self._error is not None:
            raise self._error
        return self._slot.taken

    def save(self, snapshot: Snapshot, hashes: Future[Hashes | None] | None = None) -> None:
        """Queue a snapshot; not while `slot_taken`. It is not stored if saving has ended. Raises the error
        that ended saving. `hashes`: of the sections of which it has a share, whole."""
        with self._changed:
            assert not self.slot_taken, "a trainer holds one snapshot at a time"
            self._newest = snapshot.step
            if self._over or self._closed:
                return
            self._slot.taken = True
            self._waiting = snapshot
            if hashes is not None:
                self._hashes[snapshot.step] = hashes
            self._changed.notify_all()

    def done(self, step: int) -> bool:
        """Whether this rank has done its share of checkpoint `step` or of a newer one (rank 0: published it),
        or it is closed. Raises the error that made it impossible."""
        error = self._error or self._lost.get(step)
        if error is not None:
            raise error
        return self._done >= step or self._closed

    def wait(self, timeout_s: float) -> None:
        """Block until something is done, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def behind(self) -> bool:
        """Whether a queued snapshot is not done yet."""
        return self._done < self._newest

    def close(self) -> None:
        """Give up snapshots that are not published yet."""
        with self._changed:
            self._closed = True
            self._cancel.set()
            self._drop_waiting()
        self._trouble.close()

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting, self._slot.taken = None, False
        self._changed.notify_all()

    def _loop(self) -> None:
        try:
            while not self._closed:
                self._store_next()
                self._publish_newest()
        except Cancelled:
            return
        except Fenced as error:
            log.info("nothing is saved any more: %s", error)
            self.close()
            self._on_fenced()
        except CONNECTION_LOST as error:
            if not self._closed:  # else the rendezvous store ended with its generation
                self._on_rendezvous_lost(error)
        except Exception as error:  # raised at the compute thread's next call
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._drop_waiting()

    def _store_next(self) -> None:
        """Store the waiting snapshot, if any, and free its slot."""
        with self._changed:
            pause = _POLL_S if self._stored else None
            self._changed.wait_for(lambda: self._waiting is not None or self._closed, timeout=pause)
            snapshot, self._waiting = self._waiting, None
        if snapshot is None:
            return
        step = snapshot.step
        try:
            receipts = self._upload(snapshot)
        finally:
            del snapshot
            with self._changed:
                self._slot.taken = False
                self._changed.notify_all()
        self._board.set(_key(step, self._rank), f"{self._hashed(step)}\n{receipts}")
        if self._rank == 0:
            self._stored.append(step)
        else:
            self._finish(step)

    def _hashed(self, step: int) -> str:
        """Hashes of this worker's sections, as JSON. Raises `Cancelled` if the generation ended before."""
        future = self._hashes.pop(step, None)
        found = {} if future is None else future.result()
        if found is None:
            raise Cancelled
        return json.dumps(found)

    def _upload(self, snapshot: Snapshot) -> str:
        """Store the snapshot's parts, one file in memory at a time; returns their receipts, one on a line."""
        checkpoint = CheckpointRef(step=snapshot.step, generation=self._place.generation)
        receipts = [self._store_part(checkpoint, part) for part in snapshot.parts]
        return "\n".join(receipt.to_bytes().decode() for receipt in receipts)

    def _store_part(self, checkpoint: CheckpointRef, part: PartSnapshot) -> Receipt:
        payload = pack(part.tensors)
        return self._insist(
            lambda: write_part(
                self._place.store,
                self._place.job,
                checkpoint,
                part.section,
                part.part,
                part.num_parts,
                payload,
                metadata=part.scalars,
            )
        )

    def _publish_newest(self) -> None:
        """Publish the newest step whose parts are all stored; older ones are then obsolete."""
        for step in sorted(self._stored, reverse=True):
            keys = [_key(step, rank) for rank in range(self._num_ranks)]
            if not self._board.check(keys):
                continue
            told = [self._board.get(key).splitlines() for key in keys]
            corrupt = self._differing(step, [json.loads(hashes) for hashes, *_ in told])
            try:
                if corrupt is not None:
                    log.error("checkpoint %d is not published: %s", step, corrupt)
                    self._lost[step] = corrupt
                else:
                    self._publish(step, [Receipt.from_bytes(line) for _, *lines in told for line in lines])
            except (Corrupt, NotFound) as error:  # a part was deleted or changed from outside
                self._trouble.tell(f"checkpoint {step} is given up: {error}")
                self._lost[step] = error
            self._forget_receipts([other for other in self._stored if other <= step])
            self._stored = [other for other in self._stored if other > step]
            return

    def _differing(self, step: int, told: Sequence[Mapping[str, int]]) -> CorruptState | None:
        """Raised where this step is waited for. Elsewhere the next commits find the same."""
        hashes = [{int(section): value for section, value in one.items()} for one in told]
        found = differing(self._place.compared, hashes, self._place.origins)
        if not found:
            return None
        place = self._place
        return CorruptState(corruption_of(place.generation, step, sorted(found), place.members, found))

    def _publish(self, step: int, receipts: Sequence[Receipt]) -> None:
        place = self._place
        checkpoint = CheckpointRef(step=step, generation=place.generation)
        manifest = assemble(
            receipts,
            job=place.job,
            checkpoint=checkpoint,
            num_sections=place.num_sections,
            data_position=step * place.global_batch_size,
            recipe=place.recipe,
        )

        def listed() -> None:
            try:
                publish(place.store, place.job, place.generation, manifest)
            except HeadCorrupt as error:
                raise StoreUnavailable(str(error)) from error
            except Fenced as error:
                if error.open_generation < 0:  # this generation is not fenced: the head is lost
                    raise StoreUnavailable(f"{place.job}: there is no head.json to publish to") from error
                raise

        self._insist(listed)
        self._on_published(checkpoint)
        self._finish(step)

    def _forget_receipts(self, steps: Sequence[int]) -> None:
        for step in steps:
            for rank in range(self._num_ranks):
                self._board.delete_key(_key(step, rank))

    def _insist(self, call: Callable[[], T]) -> T:
        """Call, and retry while the store is unavailable or refuses, until the generation ends."""
        result = retrying(
            call,
            patience_s=math.inf,
            cancel=self._cancel,
            refusals=True,
            on_retry=lambda error, _: self._trouble.tell(str(error)),
        )
        self._progress.saved += 1
        self._trouble.tell("")
        return result

    def _finish(self, step: int) -> None:
        with self._changed:
            self._done = max(self._done, step)
            self._changed.notify_all()


def _key(step: int, rank: int) -> str:
    return f"receipts/{step}/{rank}"
