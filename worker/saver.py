"""Checkpoints of one generation, written and published behind the training's back.

Every host of a section stores its share of the section's tensors and leaves the receipts on the
generation's rendezvous store; rank 0 collects them and publishes. Training never waits for the store: if it
is away, at most `_MAX_WAITING` snapshots are kept, the newest, and an older one that lacks somebody's parts
is never published.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint import (
    Cancelled,
    CheckpointId,
    Fenced,
    Receipt,
    assemble,
    publish,
    retrying,
    write_part,
)
from ..checkpoint import (
    Store as CheckpointStore,
)
from ..checkpoint.tensors import pack
from .execution.gloo import Store
from .progress import Progress

log = logging.getLogger("makara.saver")

_MAX_WAITING = 2
_POLL_S = 0.05


@dataclass(frozen=True)
class PartSnapshot:
    """This worker's share of one section, copied to host memory."""

    section: int
    part: int
    num_parts: int
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, int | float | bool | str]  # of the whole section; every part brings the same


@dataclass(frozen=True)
class Snapshot:
    step: int  # steps committed
    parts: tuple[PartSnapshot, ...]


@dataclass(frozen=True)
class Place:
    """Where a generation's checkpoints go, and how they are described."""

    store: CheckpointStore
    job: str
    generation: int
    num_sections: int
    global_batch_size: int
    recipe: Mapping[str, Any]


def share(names: Sequence[str], sizes: Mapping[str, int], part: int, num_parts: int) -> list[str]:
    """The names, in order, that fall to `part` when they are cut into `num_parts` runs of nearly equal
    bytes."""
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
    """Owned by the compute thread; one thread of its own uploads, and on rank 0 publishes as well."""

    def __init__(
        self,
        place: Place,
        rank: int,
        num_ranks: int,
        board: Store,
        on_published: Callable[[CheckpointId], None],
        on_lost: Callable[[RuntimeError], None],
        progress: Progress | None = None,
    ) -> None:
        """`on_lost`: called when the rendezvous store cannot be reached, without which none is published."""
        self._place = place
        self._rank = rank
        self._num_ranks = num_ranks
        self._board = board
        self._on_published = on_published
        self._on_lost = on_lost
        self._progress = progress or Progress()
        self._changed = threading.Condition()
        self._waiting: list[Snapshot] = []
        self._stored: list[int] = []  # steps of which this rank's parts are stored, not yet published
        self._newest = -1  # step of the newest snapshot queued
        self._done = -1  # newest step of which all that falls to this rank is done
        self._cancel = threading.Event()  # the upload under way is not wanted any more
        self._closed = False
        self._error: Exception | None = None
        threading.Thread(target=self._loop, name="saver", daemon=True).start()

    def save(self, snapshot: Snapshot) -> None:
        """Queue a snapshot; the oldest gives way when too many wait."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(snapshot)
            self._newest = snapshot.step
            if len(self._waiting) > _MAX_WAITING:
                dropped = self._waiting.pop(0)
                log.warning("checkpoint %d is given up: the store is too slow or away", dropped.step)
            self._changed.notify_all()

    def done(self, step: int) -> bool:
        """Whether this rank has done its share of checkpoint `step` or of a newer one (rank 0: published
        it)."""
        if self._error is not None:
            raise self._error
        return self._done >= step or self._closed

    def wait(self, timeout_s: float) -> None:
        """Block until something got done, at most this long."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def behind(self) -> bool:
        """Whether something that was queued is not done yet."""
        return self._done < self._newest

    def close(self) -> None:
        """Give up what is not published yet."""
        with self._changed:
            self._closed = True
            self._cancel.set()
            self._changed.notify_all()

    def _loop(self) -> None:
        try:
            while not self._closed:
                snapshot = self._next()
                if snapshot is not None:
                    self._upload(snapshot)
                self._publish_newest()
        except Cancelled:
            return
        except Fenced as error:
            log.info("a newer generation is open: %s", error)
            self.close()
        except RuntimeError as error:
            if not self._closed:  # else the rendezvous store went with its generation
                self._on_lost(error)
        except Exception as error:  # raised where the compute thread saves, or waits for what is saved
            self._error = error

    def _next(self) -> Snapshot | None:
        with self._changed:
            pause = _POLL_S if self._stored else None
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout=pause)
            return self._waiting.pop(0) if self._waiting and not self._closed else None

    def _upload(self, snapshot: Snapshot) -> None:
        checkpoint = CheckpointId(snapshot.step, self._place.generation)
        receipts: list[Receipt] = []
        for part in snapshot.parts:
            payload = pack(part.tensors)

            def write(part: PartSnapshot = part, payload: bytes = payload) -> Receipt:
                return write_part(
                    self._place.store,
                    self._place.job,
                    checkpoint,
                    part.section,
                    part.part,
                    part.num_parts,
                    payload,
                    metadata=part.scalars,
                )

            receipts.append(retrying(write, patience_s=math.inf, cancel=self._cancel))
            self._progress.saved += 1
        text = json.dumps([receipt.to_json() for receipt in receipts])
        self._board.set(_key(snapshot.step, self._rank), text)
        if self._rank == 0:
            self._stored.append(snapshot.step)
        else:
            self._finish(snapshot.step)

    def _publish_newest(self) -> None:
        for step in sorted(self._stored, reverse=True):
            keys = [_key(step, rank) for rank in range(self._num_ranks)]
            if not self._board.check(keys):
                continue
            receipts = [
                Receipt.from_json(value) for key in keys for value in json.loads(self._board.get(key))
            ]
            self._publish(step, receipts)
            self._stored = [other for other in self._stored if other > step]
            return

    def _publish(self, step: int, receipts: Sequence[Receipt]) -> None:
        place = self._place
        checkpoint = CheckpointId(step, place.generation)
        manifest = assemble(
            receipts,
            job=place.job,
            checkpoint=checkpoint,
            num_sections=place.num_sections,
            data_position=step * place.global_batch_size,
            recipe=place.recipe,
        )
        retrying(
            lambda: publish(place.store, place.job, place.generation, manifest),
            patience_s=math.inf,
            cancel=self._cancel,
        )
        self._progress.saved += 1
        self._on_published(checkpoint)
        self._finish(step)

    def _finish(self, step: int) -> None:
        with self._changed:
            self._done = max(self._done, step)
            self._changed.notify_all()


def _key(step: int, rank: int) -> str:
    return f"receipts/{step}/{rank}"
