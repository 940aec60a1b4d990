"""Opens the head for a generation, which closes all older ones; checks first that the head is as known."""

from __future__ import annotations

from collections.abc import Collection

from ..protocol.messages import CheckpointRef
from .errors import Conflict, Fenced, HeadAhead, HeadCorrupt, HeadLacks, HeadMissing, StoreUnavailable
from .head import Head, Retired, swap_head
from .layout import head_key
from .records import FORMAT
from .stores.store import Store

_NOT_OURS = "which another manager has opened, or this one before its journal was taken from a backup"


def open_generation(
    store: Store,
    job: str,
    generation: int,
    *,
    opener: int = 0,
    opened: int | None = None,
    tried: int | None = None,
    known: Collection[CheckpointRef] = (),
) -> Head:
    """Close all older generations to publishing and open this one, based on the newest checkpoint.

    Opening it again changes nothing: it is told by `opener`, a number below 2^31 that is the same at each try
    and nobody else's (0: do not check). The caller knows of the head that it has reached generation `opened`
    (0: nobody has opened it; None: do not check), that it can have reached none beyond `tried` (None: do not
    check) but this one, and that it lists `known`. Changes nothing and raises `HeadMissing` or `HeadLacks` if
    that is wrong, `HeadAhead` if somebody else has opened this generation or the job, and `Fenced` if a newer
    generation is open.
    """

    def change(head: Head | None) -> Head | None:
        if head is None:
            if opened or known:
                raise HeadMissing(f"{head_key(job)} is not in {store.uri}; {_expected(opened or 0, known)}")
            return Head(FORMAT, job, 0, 0, None, (), ()).opened(generation, None, opener)
        if head.generation > generation:
            raise Fenced(generation, head.generation)
        if tried is not None and tried < head.generation < generation:
            raise HeadAhead(
                f"{head_key(job)} in {store.uri} is open at generation {head.generation}, {_NOT_OURS}"
            )
        _check_opener(store, head, generation, opener)
        if opened is not None:
            _check_known(store, head, generation, opened, known)
        if head.generation == generation:
            return None
        base = head.manifests[0] if head.manifests else None
        return head.opened(generation, base, opener)

    try:
        return swap_head(store, job, change)
    except HeadCorrupt as error:
        if opened is None:
            raise
        raise HeadMissing(f"{error}; {_expected(opened or 0, known)}") from error


def _check_opener(store: Store, head: Head, generation: int, opener: int) -> None:
    if head.generation == generation and opener and head.opener not in (0, opener):
        where = f"{head_key(head.job)} in {store.uri}"
        raise HeadAhead(f"{where} is open at generation {generation} already, {_NOT_OURS}")


def _check_known(
    store: Store, head: Head, generation: int, opened: int, known: Collection[CheckpointRef]
) -> None:
    where = f"{head_key(head.job)} in {store.uri}"
    if head.generation < opened:
        raise HeadLacks(f"{where} is open at generation {head.generation}; {_expected(opened, known)}")
    # The generation's members step only after this call returns, so anything published in it is somebody
    # else's. A head that nobody has opened may list only the checkpoint that the job starts from.
    own = set[CheckpointRef]() if opened else set(known)
    foreign = [c for c in head.manifests if c.generation >= generation or not opened]
    if set(foreign) - own:
        raise HeadAhead(
            f"{where} lists checkpoints that this manager knows nothing of, the newest {head.manifests[0]}"
        )
    lacking = sorted(set(known) - set(head.manifests), key=lambda checkpoint: checkpoint.age_rank)
    if lacking and head.generation < generation:
        names = ", ".join(map(str, lacking))
        raise HeadLacks(f"{where} does not list checkpoint {names}, which was published")


def _expected(opened: int, known: Collection[CheckpointRef]) -> str:
    newest = max(known, key=lambda checkpoint: checkpoint.age_rank, default=None)
    listed = "" if newest is None else f" and listed checkpoint {newest}"
    return f"it was opened for generation {opened}{listed}"


def restart_generation(store: Store, job: str, generation: int, *, now: float, opener: int = 0) -> Head:
    """Open this generation without checkpoints: all listed ones leave the head at Unix second `now`.

    Also replaces a missing or unreadable head. Safe to repeat; `opener` as of `open_generation`. Raises
    `HeadAhead` if somebody else has opened it, and `Fenced` if a newer generation is open.
    """
    key = head_key(job)
    tagged = store.read_tagged(key)
    try:
        head = None if tagged is None else Head.from_bytes(tagged[0], key)
    except HeadCorrupt:
        head = None
    if head is not None and head.generation >= generation:
        if head.generation > generation:
            raise Fenced(generation, head.generation)
        _check_opener(store, head, generation, opener)
        return head
    version, retired = 0, ()
    if head is not None:
        version = head.version + 1
        retired = (*head.retired, *(Retired(checkpoint, now) for checkpoint in head.manifests))
    began = Head(FORMAT, job, version, 0, None, (), retired).opened(generation, None, opener)
    try:
        store.swap(key, began.to_bytes(), None if tagged is None else tagged[1])
    except Conflict as error:
        raise StoreUnavailable(f"{key} in {store.uri}: changed meanwhile: {error}") from error
    return began
