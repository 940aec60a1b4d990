"""`Store`, the protocol of object stores, and `retrying`, for calls while a store is unavailable.

Three stores implement it: a local folder (`file:///abs/path`), S3 (`s3://bucket/prefix`) and Azure Blob
Storage (`az://container/prefix`). A store writes objects atomically, and has a compare-and-swap.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol, TypeVar

from ..errors import Cancelled, CheckpointError, InvalidKey, NotFound, StoreRefused, StoreUnavailable

T = TypeVar("T")

MOST_RECORD_BYTES = 16 << 20  # of a head, a manifest, a calibration: 100,000 tensors

_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing; `written_at` is Unix seconds by the store's clock."""

    key: str
    size_bytes: int
    written_at: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A write begun at Unix second `began_at` that has not ended: in progress, or left by a dead writer.

    `key` is the object's if the store knows it; for a local temporary file it is the file's own path.
    """

    key: str
    began_at: float
    upload: str  # the store's id of the write


class Store(Protocol):
    """Objects under keys like `job/sections/4-g1/0.0.safetensors`.

    Every method may raise `StoreUnavailable` (try again), `StoreRefused` (do not) or `InvalidKey`.
    Safe to use from several threads.
    """

    @property
    def uri(self) -> str:
        """Where the store is, as given to `open_store`, without a trailing slash."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, or replace it, atomically. Durable when this returns."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Like `put`, with the bytes of a local file, in bounded memory."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object, which is a record: `StoreRefused` if it has more than `MOST_RECORD_BYTES`.
        Raises `NotFound`."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` (at least 1) bytes from `start` on, fewer at the end. Raises `NotFound`."""
        ...

    def size(self, key: str) -> int:
        """Bytes of the object. Raises `NotFound`."""
        ...

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, size in bytes) of all objects whose key starts with `prefix`, in key order."""
        return iter([(found.key, found.size_bytes) for found in self.list_objects(prefix)])

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """As `list`, with the time at which each was written."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error if it does not exist."""
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove these objects; no error for those that do not exist."""
        ...

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Writes below `prefix` (it ends with a slash) that have not ended, in order of their keys.

        Azure does not list those that replace an existing object; it drops them itself after a week.
        """
        ...

    def abort(self, unfinished: Unfinished) -> None:
        """Abort an unfinished write, and free its storage; no error if it has ended since.

        If its writer lives, its write raises `StoreUnavailable`, and may be repeated.
        """
        ...

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        """(the object, a record as of `get`, the tag to `swap` it with); None if it does not exist."""
        ...

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        """Replace the object if its tag is `expected_etag` (None: if it does not exist); returns its new tag.

        Raises `Conflict` otherwise. After a `StoreUnavailable` it is unknown whether the swap happened: read
        again.
        """
        ...


def check_key(key: str) -> str:
    """Return `key`. Raises `InvalidKey` unless every store accepts it and it stays below the root."""
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidKey(
            f"key {key!r}: expected segments of [A-Za-z0-9._=-], not starting with a dot, joined by '/'"
        )
    return key


def retrying(
    call: Callable[[], T],
    *,
    patience_s: float = 120.0,
    cancel: Event | None = None,
    first_delay_s: float = 0.1,
    longest_delay_s: float = 5.0,
    refusals: bool = False,
    on_retry: Callable[[CheckpointError, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    uniform: Callable[[float, float], float] = random.uniform,
) -> T:
    """Call `call`, and retry while the store is unavailable, for at most `patience_s`. `call` must be
    idempotent.

    Delays double from `first_delay_s` to `longest_delay_s`, each drawn between half and all of that, so that
    workers do not retry in step. `refusals`: retry what the store refuses as well, since an administrator may
    fix it. `on_retry(error, delay_s)` is called before each wait. Raises the last error after `patience_s`,
    `Cancelled` when `cancel` is set, and any other error at once.
    """
    event = cancel or Event()
    deadline = clock() + patience_s
    delay_s = first_delay_s
    while True:
        if event.is_set():
            raise Cancelled("cancelled by the caller")
        try:
            return call()
        except (StoreUnavailable, StoreRefused) as error:
            if isinstance(error, StoreRefused) and not refusals:
                raise
            wait_s = uniform(delay_s / 2, delay_s)
            if clock() + wait_s > deadline:
                raise
            if on_retry is not None:
                on_retry(error, wait_s)
        event.wait(wait_s)
        delay_s = min(2 * delay_s, longest_delay_s)
