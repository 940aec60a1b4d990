"""Reads parts of a checkpoint in parallel, and verifies each by its checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from .errors import Corrupt
from .manifest import CheckpointPart
from .safetensors_header import parse_header
from .stores.store import Store, retrying

_PIECE_BYTES = 64 << 20
_NUM_PARALLEL = 4


def read_parts(
    store: Store,
    parts: Collection[CheckpointPart],
    *,
    retry: Callable[[Callable[[], bytes]], bytes] = retrying,
    on_read: Callable[[], None] | None = None,
) -> dict[tuple[int, int], bytes]:
    """Read these safetensors files of a checkpoint: {(section, part): bytes}.

    Each is checked against the size, checksum and tensor names of the manifest. Four files are in flight at a
    time, each read by `retry`. `on_read` is called for each piece received. Both are called on any of
    several threads. Raises `Corrupt` or `NotFound` naming the key, and what `retry` raises.
    """

    def read(part: CheckpointPart) -> bytes:
        return retry(lambda: read_part(store, part, on_read))

    pool = ThreadPoolExecutor(_NUM_PARALLEL, thread_name_prefix="read-parts")
    try:
        files = list(pool.map(read, parts))
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure the other files are not needed
    return {(part.section, part.part): data for part, data in zip(parts, files, strict=True)}


def read_part(store: Store, part: CheckpointPart, on_read: Callable[[], None] | None = None) -> bytes:
    """Read one file and check it against the manifest; for `on_read` see `read_parts`. Raises `Corrupt`
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
