"""Reads parts of a checkpoint in parallel, and verifies each by its checksum."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from .errors import Corrupt, StoreRefused
from .manifest import CheckpointPart
from .safetensors_header import MOST_HEADER_BYTES, Header, parse_header
from .stores.store import Store, retrying

_PIECE_BYTES = 64 << 20
_NUM_PARALLEL = 4
_MOST_OF_DISK = 0.5  # of what is free


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
    _check_names(parse_header(data, where), part, where)
    return data


def fetch_part(store: Store, part: CheckpointPart, path: Path) -> Header:
    """Copy one file of a checkpoint to `path` in bounded memory, and return its header.

    Checked like `read_part`. Each piece is retried by itself. Raises `StoreRefused` where the disk has not
    room for the part and for others: a manifest says how large its parts are, and need not be true.
    """
    where = f"{part.key} in {store.uri}"
    free_bytes = shutil.disk_usage(path.parent).free
    if part.size_bytes > _MOST_OF_DISK * free_bytes:
        raise StoreRefused(f"{where}: {part.size_bytes} bytes, and {path.parent} has {free_bytes} left")
    digest, received = hashlib.sha256(), 0
    with path.open("wb") as file:
        while received < part.size_bytes:
            length = min(_PIECE_BYTES, part.size_bytes - received)
            piece = retrying(partial(store.get_range, part.key, received, length))
            if not piece:
                break
            file.write(piece)
            digest.update(piece)
            received += len(piece)
    size_bytes = received if received < part.size_bytes else store.size(part.key)
    if size_bytes != part.size_bytes:
        raise Corrupt(f"{where}: {size_bytes} bytes, {part.size_bytes} were written")
    if digest.hexdigest() != part.sha256:
        raise Corrupt(f"{where}: the checksum does not match")
    header = file_header(path, where)
    _check_names(header, part, where)
    return header


def file_header(path: Path, where: str) -> Header:
    """The header of a safetensors file. Raises `Corrupt` naming `where`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(0)
        return parse_header(file.read(min(8 + length, MOST_HEADER_BYTES, size)), where, total_bytes=size)


def _check_names(header: Header, part: CheckpointPart, where: str) -> None:
    if set(header.tensors) != set(part.tensors):
        raise Corrupt(f"{where}: holds {sorted(header.tensors)}, the manifest says {sorted(part.tensors)}")


def _fetch(store: Store, part: CheckpointPart, on_read: Callable[[], None]) -> bytes:
    """Read a big file in pieces, so that a slow store can be distinguished from one that hangs."""
    if part.size_bytes <= _PIECE_BYTES:
        data = store.get_range(part.key, 0, part.size_bytes + 1)  # one more would be too many
        on_read()
        return data
    if (size_bytes := store.size(part.key)) != part.size_bytes:
        raise Corrupt(f"{part.key} in {store.uri}: {size_bytes} bytes, {part.size_bytes} were written")
    pieces: list[bytes] = []
    for start in range(0, part.size_bytes, _PIECE_BYTES):
        pieces.append(store.get_range(part.key, start, min(_PIECE_BYTES, part.size_bytes - start)))
        on_read()
    return b"".join(pieces)
