"""Copies a published checkpoint of one job to be the first checkpoint of another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..protocol.messages import CheckpointRef
from .errors import Corrupt, HeadAhead, HeadCorrupt, NoReadable, NotFound
from .head import Head, delete_objects, read_head, swap_head
from .layout import checkpoint_of, head_key, job_prefix, manifest_key, part_key, parts_prefix
from .manifest import CheckpointPart, Manifest, load_manifest
from .reader import fetch_part
from .records import FORMAT
from .stores.store import Store, retrying

_LOOKS = 3  # how often the source's head is read: its job may retire what is being copied


def published(store: Store, job: str, step: int | None = None) -> tuple[CheckpointRef, ...]:
    """The checkpoints that the head of `job` lists, newest first; only of `step` if given.

    Raises `NoReadable` if there is none, or the head cannot be read.
    """
    try:
        head = read_head(store, job)
    except HeadCorrupt as error:
        raise NoReadable(f"the checkpoints of job {job} in {store.uri} are not known: {error}") from error
    if head is None:
        raise no_checkpoint(store, job)
    found = tuple(c for c in head.manifests if step is None or c.step == step)
    if not found:
        steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(head.manifests))
        there = f"those of steps {steps} are published" if steps else "none is published"
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise NoReadable(f"job {job} in {store.uri} has no {wanted}: {there}")
    return found


def no_checkpoint(store: Store, job: str) -> NoReadable:
    """The error for a job without a head."""
    return NoReadable(f"{store.uri} has no checkpoint of job {job}")


def copy_checkpoint(
    source: Store,
    source_job: str,
    store: Store,
    job: str,
    *,
    step: int | None = None,
    below: int | None = None,
    scratch: Path | None = None,
    on_skip: Callable[[CheckpointRef, str], None] = lambda _checkpoint, _why: None,
) -> tuple[CheckpointRef, CheckpointRef | None]:
    """Copy the newest readable checkpoint of `source_job`, or that of `step`, as the first of `job`.

    Checkpoints of step `below` and later are skipped, because they leave nothing to train. Each part is
    checked, in a file below `scratch` (None: the system's temporary folder). The copy is listed by a head of
    generation 0, which nobody has opened. Returns (the checkpoint of `job`, its source); the source is None
    if an earlier call, whose answer was lost, made the copy. Repeated, it goes on where it was cut off.
    `on_skip` is called with each checkpoint that is newer than the copied one, and why it was not copied.
    Raises `NoReadable` with the reasons, `HeadAhead` if `job` has begun already, and the stores' errors.
    """
    reasons: dict[CheckpointRef, str] = {}
    for look in range(1, _LOOKS + 1):
        earlier = _begun(read_head(store, job), store)
        if earlier is not None:
            return earlier, None
        for checkpoint in published(source, source_job, step):
            if below is not None and checkpoint.step >= below:
                reasons[checkpoint] = f"{checkpoint.step} of {below} steps (training.steps) are made"
                continue
            try:
                manifest = load_manifest(source, source_job, checkpoint)
                copied = _copy(source, manifest, store, job, scratch)
            except (Corrupt, NotFound) as error:
                reasons[checkpoint] = str(error)
                if look < _LOOKS and not _is_listed(source, source_job, checkpoint):
                    break  # retired meanwhile, since newer ones were published
            else:
                for skipped, why in reasons.items():
                    if skipped.age_rank > checkpoint.age_rank:
                        on_skip(skipped, why)
                return copied, checkpoint
    why = "; ".join(f"{checkpoint}: {reason}" for checkpoint, reason in reasons.items())
    raise NoReadable(f"job {source_job} in {source.uri}: none can be gone on from: {why}")


def _is_listed(store: Store, job: str, checkpoint: CheckpointRef) -> bool:
    head = read_head(store, job)
    return head is not None and checkpoint in head.manifests


def discard_copies(store: Store, job: str) -> tuple[CheckpointRef, ...]:
    """Delete the parts that failed copies have left; nothing if one is listed. Not while one is being made.

    Returns the checkpoints of which there were some. Safe to repeat.
    """
    if read_head(store, job) is not None:
        return ()
    stored = [key for key, _ in store.list(job_prefix(job))]
    begun = [unfinished.key for unfinished in store.unfinished(job_prefix(job))]
    found = set(filter(None, (checkpoint_of(job, key) for key in (*stored, *begun))))
    copies = sorted((checkpoint for checkpoint in found if checkpoint.generation == 0), key=lambda c: c.step)
    for checkpoint in copies:
        delete_objects(store, job, checkpoint)
    return tuple(copies)


def _begun(head: Head | None, store: Store) -> CheckpointRef | None:
    if head is None:
        return None
    if head.generation or not head.manifests:
        raise HeadAhead(f"{head_key(head.job)} in {store.uri} was opened for generation {head.generation}")
    return head.manifests[0]


def _copy(source: Store, manifest: Manifest, store: Store, job: str, scratch: Path | None) -> CheckpointRef:
    """Copy the parts that are not there yet, each retried by itself, and list the copy.

    The manifest is stored first: parts of the right size beside it are those of an earlier call, and whole.
    """
    copied = CheckpointRef(step=manifest.step, generation=0)
    parts = tuple(replace(p, key=part_key(job, copied, p.section, p.part)) for p in manifest.parts)
    own = replace(manifest, job=job, checkpoint=copied, parts=parts)
    if not _is_stored(store, own):
        delete_objects(store, job, copied)  # perhaps of another checkpoint of this step
        store.put(manifest_key(job, copied), own.to_bytes())
    sizes = dict(store.list(parts_prefix(job, copied)))
    for there, here in zip(manifest.parts, parts, strict=True):
        if sizes.get(here.key) != here.size_bytes:
            retrying(partial(_copy_part, source, there, store, here, scratch))
    first = Head(FORMAT, job, 0, 0, None, (copied,), ())
    head = swap_head(store, job, lambda head: first if head is None else None)
    return _begun(head, store) or copied


def _is_stored(store: Store, manifest: Manifest) -> bool:
    try:
        return store.get(manifest_key(manifest.job, manifest.checkpoint)) == manifest.to_bytes()
    except NotFound:
        return False


def _copy_part(
    source: Store, there: CheckpointPart, store: Store, here: CheckpointPart, scratch: Path | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="makara-copy-", dir=scratch) as folder:
        path = Path(folder, "part")
        fetch_part(source, there, path)
        store.put_file(here.key, path)
