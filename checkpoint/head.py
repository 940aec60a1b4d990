"""`head.json`: which generation may publish, and which checkpoints exist.

It changes only by compare-and-swap, so that checks against the read head still hold when it is written. A
checkpoint exists iff the head lists it. Each change within a generation increments `version`, so a head never
has the same bytes twice, and a writer that missed several changes cannot succeed by accident (no ABA).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pydantic.dataclasses import dataclass

from ..protocol.messages import CheckpointRef
from .errors import Conflict, Corrupt, Fenced, HeadCorrupt, Incomplete, Retained, StoreUnavailable, Superseded
from .layout import checkpoint_of, head_key, manifest_key, parts_prefix
from .manifest import Manifest
from .records import FORMAT, STRICT, Count, decode, encode
from .stores.store import Store

_MAX_SWAPS = 100  # lost races in a row; each means that another writer succeeded
_PARALLEL_CHECKS = 8
_OPENER_BIT = 32  # of `version`


@dataclass(frozen=True, slots=True, config=STRICT)
class Retired:
    """A checkpoint that left the head at Unix second `at` and may not be deleted yet."""

    checkpoint: CheckpointRef
    at: float


@dataclass(frozen=True, config=STRICT)
class Head:
    """`generation` is open and began from `base`; `manifests` are those that exist, newest first.

    `version` counts changes in its lower half. The upper half is `opener`: trainers of earlier versions,
    which refuse a field that they do not know, keep it when they change the head.
    """

    format: int
    job: str
    version: Count
    generation: Count
    base: CheckpointRef | None
    manifests: tuple[CheckpointRef, ...]
    retired: tuple[Retired, ...]

    @property
    def opener(self) -> int:
        """A number of whoever opened the generation; 0, as in heads of earlier versions: not known."""
        return self.version >> _OPENER_BIT

    def opened(self, generation: int, base: CheckpointRef | None, opener: int) -> Head:
        """The head open for another generation. `opener` is less than 2^31; 0: not known."""
        version = opener << _OPENER_BIT if opener else self.version
        return replace(self, generation=generation, base=base, version=version)

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Head:
        """Read what `to_bytes` wrote under `key`. Raises `HeadCorrupt` saying what is wrong."""
        try:
            head = decode(cls, data, key)
        except Corrupt as error:
            raise HeadCorrupt(str(error)) from error
        if head.format != FORMAT:
            raise HeadCorrupt(f"{key}: format {head.format}; this version reads {FORMAT}")
        if key != head_key(head.job):
            raise HeadCorrupt(f"{key}: is the head of job {head.job!r}")
        return head


def read_head(store: Store, job: str) -> Head | None:
    """The head of `job`, None before its first generation. Raises `HeadCorrupt`."""
    key = head_key(job)
    tagged = store.read_tagged(key)
    return None if tagged is None else Head.from_bytes(tagged[0], key)


def candidates(head: Head) -> tuple[CheckpointRef, ...]:
    """The checkpoints to try to load from, best first: the base of the open generation, then newest first."""
    rest = tuple(checkpoint for checkpoint in head.manifests if checkpoint != head.base)
    return rest if head.base is None else (head.base, *rest)


def publish(store: Store, job: str, generation: int, manifest: Manifest) -> Head:
    """Store the manifest and list it in the head, after checking existence and size of all its parts.

    Publishing again changes nothing, even if the checkpoint was retired since. Raises `Fenced` unless
    `generation` is the open one, `Superseded` if it has published a later step, `NotFound` or `Corrupt`
    naming a part that is missing or has the wrong size, and `HeadCorrupt`.
    """
    checkpoint = manifest.checkpoint
    if (manifest.job, manifest.generation) != (job, generation):
        raise Incomplete(
            f"manifest {checkpoint} of job {manifest.job} is not of generation {generation} of {job}"
        )

    def change(head: Head | None) -> Head | None:
        if head is None or head.generation != generation:
            raise Fenced(generation, -1 if head is None else head.generation)
        if checkpoint in head.manifests or any(r.checkpoint == checkpoint for r in head.retired):
            return None
        if not can_be_published(head, checkpoint):
            raise Superseded(f"checkpoint {checkpoint} of {job}: a later one of its generation is published")
        # Inside the loop, so that a retry notices parts deleted since the last try.
        _check_stored(store, manifest)
        store.put(manifest_key(job, checkpoint), manifest.to_bytes())
        newest_first = sorted((checkpoint, *head.manifests), key=lambda c: c.age_rank, reverse=True)
        return replace(head, manifests=tuple(newest_first))

    return swap_head(store, job, change)


def can_be_published(head: Head, checkpoint: CheckpointRef) -> bool:
    """Whether a writer may still publish it: its generation is open and has not published a later step."""
    known = (*head.manifests, *(retired.checkpoint for retired in head.retired))
    newest = max((other.step for other in known if other.generation == head.generation), default=-1)
    # Nobody trains in generation 0, which has what the job starts from.
    return checkpoint.generation >= max(1, head.generation) and checkpoint.step > newest


def retire(store: Store, job: str, checkpoint: CheckpointRef, *, now: float, ended: bool = False) -> Head:
    """Take `checkpoint` out of the head at Unix second `now`; its parts stay for current readers.

    Does nothing if it is not listed. Raises `Retained` for the base of the open generation, unless the job
    has `ended`, and for the only checkpoint.
    """

    def change(head: Head | None) -> Head | None:
        if head is None or checkpoint not in head.manifests:
            return None
        if checkpoint == head.base and not ended:
            raise Retained(
                f"checkpoint {checkpoint} of {job} is the base of open generation {head.generation}"
            )
        if len(head.manifests) == 1:
            raise Retained(f"checkpoint {checkpoint} of {job} is the only one")
        kept = tuple(other for other in head.manifests if other != checkpoint)
        base = head.base if checkpoint != head.base else None
        return replace(head, base=base, manifests=kept, retired=(*head.retired, Retired(checkpoint, now)))

    return swap_head(store, job, change)


def delete_parts(store: Store, job: str, checkpoint: CheckpointRef) -> Head:
    """Delete the objects of a checkpoint that `retire` took out of the head, one lease later (by the caller).

    Safe to repeat. Raises `Retained` if the head lists it.
    """
    head = read_head(store, job)
    if head is not None and checkpoint in head.manifests:
        raise Retained(f"checkpoint {checkpoint} of {job} is listed: retire it first")
    delete_objects(store, job, checkpoint)

    def forget(head: Head | None) -> Head | None:
        if head is None or all(retired.checkpoint != checkpoint for retired in head.retired):
            return None
        return replace(head, retired=tuple(r for r in head.retired if r.checkpoint != checkpoint))

    return swap_head(store, job, forget)


def swap_head(store: Store, job: str, change: Callable[[Head | None], Head | None]) -> Head:
    """Apply `change` to the head, again until the swap succeeds; `change` returns None to leave the head."""
    key = head_key(job)
    for _ in range(_MAX_SWAPS):
        tagged = store.read_tagged(key)
        head = None if tagged is None else Head.from_bytes(tagged[0], key)
        changed = change(head)
        if changed is None:
            return head or Head(FORMAT, job, 0, 0, None, (), ())
        changed = replace(changed, version=changed.version + 1)
        try:
            store.swap(key, changed.to_bytes(), None if tagged is None else tagged[1])
        except Conflict:
            continue
        return changed
    raise StoreUnavailable(f"{key} in {store.uri}: lost {_MAX_SWAPS} swaps in a row")


def _check_stored(store: Store, manifest: Manifest) -> None:
    keys = [part.key for part in manifest.parts]
    with ThreadPoolExecutor(_PARALLEL_CHECKS, thread_name_prefix="check-parts") as pool:
        for part, size in zip(manifest.parts, pool.map(store.size, keys), strict=True):
            if size != part.size_bytes:
                raise Corrupt(f"{part.key} in {store.uri}: {size} bytes stored, {part.size_bytes} written")


def delete_objects(store: Store, job: str, checkpoint: CheckpointRef) -> None:
    """Delete a checkpoint's parts, then its manifest: while that exists, remaining parts are found again."""
    prefix = parts_prefix(job, checkpoint)
    store.delete_many(key for key, _ in store.list(prefix) if checkpoint_of(job, key) == checkpoint)
    for unfinished in store.unfinished(prefix):
        if checkpoint_of(job, unfinished.key) == checkpoint:
            store.abort(unfinished)
    store.delete(manifest_key(job, checkpoint))
