"""Removes objects that are no longer needed. Only the manager does so, for jobs whose head it opened.

Needed are checkpoints that the head lists, those that left it less than a lease ago, those that writers of
the open generation may still publish, and finished exports. All other objects *of our own layout* are
removed; an object of any other name is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..protocol.messages import CheckpointRef
from .errors import Retained
from .head import Head, can_be_published, delete_parts, read_head, retire
from .layout import (
    checkpoint_of,
    export_done_key,
    export_step_of,
    exports_prefix,
    is_temporary_listing,
    job_prefix,
)
from .stores.store import Store, StoredObject, Unfinished

_UNFINISHED_S = 3600.0  # an upload that takes longer is aborted, unless it can still be published


@dataclass(frozen=True, slots=True)
class Swept:
    """The `head` at the end of a sweep, and what the sweep removed."""

    head: Head
    deleted: tuple[CheckpointRef, ...] = ()  # checkpoints that had left the head
    orphans: tuple[CheckpointRef, ...] = ()  # checkpoints that were never published and never can be
    exports: tuple[int, ...] = ()  # steps of exports that were never finished
    aborted: int = 0  # number of uploads that never ended


def sweep(
    store: Store,
    job: str,
    *,
    now: float,
    lease_s: float,
    opened: int | None = None,
    unwanted: Callable[[CheckpointRef], bool] = lambda _: False,
    exporting: bool = False,
    ended: bool = False,
) -> Swept | None:
    """Remove unneeded objects of `job`; returns None, and removes nothing, if the head is not the caller's.

    `opened`: the newest generation that the caller may have opened; a head beyond it is somebody else's.
    `unwanted`: whether a listed checkpoint is to leave the head now. Objects written, and checkpoints that
    left the head, within `lease_s` before Unix second `now` stay. `exporting`: an export is being written, so
    no export is touched. `ended`: so has the job, and the base of its last generation may leave the head.
    Safe to repeat. Raises the store's errors, and `Corrupt` for a bad head.
    """
    head = read_head(store, job)
    if head is None or (opened is not None and head.generation > opened):
        return None
    for checkpoint in filter(unwanted, reversed(head.manifests)):
        try:
            head = retire(store, job, checkpoint, now=now, ended=ended)
        except Retained:
            continue  # the base of the open generation stays until the next one opens
    due = [retired.checkpoint for retired in head.retired if now - retired.at >= lease_s]
    for checkpoint in due:
        head = delete_parts(store, job, checkpoint)
    written = [found for found in store.list_objects(job_prefix(job)) if now - found.written_at >= lease_s]
    orphans = _orphans(store, job, head, written)
    exports = () if exporting else _unfinished_exports(store, job, written)
    given_up = [
        unfinished
        for unfinished in store.unfinished(job_prefix(job))
        if _is_given_up(job, head, unfinished, now, lease_s, exporting)
    ]
    for unfinished in given_up:
        store.abort(unfinished)
    return Swept(head, tuple(due), orphans, exports, len(given_up))


def _is_orphan(head: Head, checkpoint: CheckpointRef) -> bool:
    kept = checkpoint in head.manifests or any(r.checkpoint == checkpoint for r in head.retired)
    return not kept and not can_be_published(head, checkpoint)


def _orphans(
    store: Store, job: str, head: Head, written: Iterable[StoredObject]
) -> tuple[CheckpointRef, ...]:
    found: dict[CheckpointRef, list[str]] = {}
    for stored in written:
        checkpoint = checkpoint_of(job, stored.key)
        if checkpoint is not None and _is_orphan(head, checkpoint):
            found.setdefault(checkpoint, []).append(stored.key)
    store.delete_many(key for keys in found.values() for key in keys)
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.age_rank))


def _unfinished_exports(store: Store, job: str, written: Iterable[StoredObject]) -> tuple[int, ...]:
    found: dict[int, list[str]] = {}
    for stored in written:
        step = export_step_of(job, stored.key)
        if step is not None:
            found.setdefault(step, []).append(stored.key)
    left = [step for step, keys in found.items() if export_done_key(job, step) not in keys]
    left = [step for step in left if not store.exists(export_done_key(job, step))]
    store.delete_many(key for step in left for key in found[step])
    return tuple(sorted(left))


def _is_given_up(
    job: str,
    head: Head,
    unfinished: Unfinished,
    now: float,
    lease_s: float,
    exporting: bool,
) -> bool:
    age_s = now - unfinished.began_at
    if exporting and unfinished.key.startswith(exports_prefix(job)):
        return False
    checkpoint = checkpoint_of(job, unfinished.key)
    if checkpoint is not None and _is_orphan(head, checkpoint):
        return age_s >= lease_s
    if checkpoint is not None and can_be_published(head, checkpoint):
        return False  # however long it takes
    ours = checkpoint is not None or export_step_of(job, unfinished.key) is not None
    return (ours or is_temporary_listing(job, unfinished.key)) and age_s >= _UNFINISHED_S
