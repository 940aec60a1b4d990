"""A store in memory: the contract of `makara.checkpoint.Store` at its shortest, for many histories."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from makara.checkpoint import Conflict, NotFound, Store
from makara.checkpoint.stores.store import StoredObject, Unfinished


class MemoryStore(Store):
    """For one thread."""

    uri = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        return iter([StoredObject(key, len(self.objects[key]), 0.0) for key in keys])

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def unfinished(self, _prefix: str) -> Iterator[Unfinished]:
        return iter(())

    def abort(self, _unfinished: Unfinished) -> None: ...

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        data = self.objects.get(key)
        return None if data is None else (data, hashlib.sha256(data).hexdigest())

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        tagged = self.read_tagged(key)
        if (None if tagged is None else tagged[1]) != expected_etag:
            raise Conflict(key)
        self.put(key, data)
        return hashlib.sha256(data).hexdigest()
