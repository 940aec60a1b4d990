"""Reads a checkpoint: the parts of some sections, in parallel, each verified by its checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from ..protocol.messages import CheckpointRef
from .errors import CheckpointError, Corrupt
from .manifest import CheckpointPart, Manifest, load_manifest
from .safetensors_header import parse_header
from .stores.store import Store, retrying

T = TypeVar("T")

_PIECE_BYTES = 64 << 20
_NUM_PARALLEL = 4


def read_sections(
    store: Store,
    job: str,
    checkpoint: CheckpointRef,
    wanted: Collection[int] | Callable[[str], bool],
    *,
    manifest: Manifest | None = None,
    patience_s: float = 60.0,
    cancel: Event | None = None,
    on_read: Callable[[], None] | None = None,
    refusals: bool = False,
    on_retry: Callable[[CheckpointError, float], None] | None = None,
) -> dict[tuple[int, int], bytes]:
    """Read the safetensors files of `checkpoint` that hold what is `wanted`: {(section, part): bytes}.

    `wanted`: section numbers, or a predicate on tensor names (a part is read if it holds one). Each file is
    checked against the size, checksum and tensor names of the manifest (read from the store unless given).
    Four files are in flight at a time; each is retried for `patience_s` while the store is unavailable,
    and with `refusals` while it refuses, until `cancel` is set. `on_read` is called for each piece received,
    and `on_retry` before each wait, both on any of several threads. Raises `Corrupt` or `NotFound` naming the
    key, and what `retrying` raises.
    """

    def trying(call: Callable[[], T]) -> T:
        return retrying(call, patience_s=patience_s, cancel=cancel, refusals=refusals, on_retry=on_retry)

    if manifest is None:
        manifest = trying(lambda: load_manifest(store, job, checkpoint))
    if callable(wanted):
        parts = tuple(part for part in manifest.parts if any(wanted(name) for name in part.tensors))
    else:
        parts = manifest.parts_of(wanted)

    return _read_all(lambda part: trying(lambda: read_part(store, part, on_read)), parts)


def read_part(store: Store, part: CheckpointPart, on_read: Callable[[], None] | None = None) -> bytes:
    """Read one file and check it against the manifest; for `on_read` see `read_sections`. Raises `Corrupt`
    naming the key, and the store's errors."""
    data = _fetch(store, part, on_read or (lambda: None))
    where = f"{part.key} in {store.uri}"
    if len(data) != part.size_bytes:
        raise Corrupt(f"{where}: {len(data)} bytes, {part.size_bytes} were written")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise Corrupt(f"{where}: the checksum does not match")
    names = parse_header(data, where).tensors
    if set(names) != set(part.tensors):
        raise Corrupt(f"{where}: holds {sorted(names)}, the manifest says {sorted(part.tensors)}")
    return data


def _fetch(store: Store, part: CheckpointPart, on_read: Callable[[], None]) -> bytes:
    """Read a big file in pieces, so that a slow store can be distinguished from one that hangs."""
    if part.size_bytes <= _PIECE_BYTES:
        data = store.get(part.key)
        on_read()
        return data
    if (size_bytes := store.size(part.key)) != part.size_bytes:
        raise Corrupt(f"{part.key} in {store.uri}: {size_bytes} bytes, {part.size_bytes} were written")
    pieces: list[bytes] = []
    for start in range(0, part.size_bytes, _PIECE_BYTES):
        pieces.append(store.get_range(part.key, start, min(_PIECE_BYTES, part.size_bytes - start)))
        on_read()
    return b"".join(pieces)


def _read_all(
    read: Callable[[CheckpointPart], bytes], parts: tuple[CheckpointPart, ...]
) -> dict[tuple[int, int], bytes]:
    pool = ThreadPoolExecutor(_NUM_PARALLEL, thread_name_prefix="read-parts")
    try:
        files = list(pool.map(read, parts))
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure the other files are not needed
    return {(part.section, part.part): data for part, data in zip(parts, files, strict=True)}
