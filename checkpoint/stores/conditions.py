"""Checks on a private object that a store honours the conditions of a swap.

Fencing depends on them: if a store accepted a write whose condition does not hold, a writer of an old
generation could publish, or bring back a head that was deleted.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import Conflict, StoreRefused
from .store import Store

_ABSENT = "If-Match on an object that is not there (as MinIO did before RELEASE.2025-09-07T16-13-09Z)"
_ADVICE = "Makara needs conditional writes as AWS S3 documents them: use a newer version of this service"


def check_conditions(store: Store, key: str) -> None:
    """Swap the object under `key`, which must not exist, with conditions that hold and others that do not.

    Leaves nothing behind. Raises `StoreRefused` if the store accepts a write that should fail, refuses one
    that should not, or returns something else than was written; `StoreUnavailable` if it does not answer.
    """
    first = _swap(store, key, b"first", None)
    try:
        second = _swap(store, key, b"second", first)
        _expect_conflict(store, key, None, "If-None-Match: * on an object that is there")
        _expect_conflict(store, key, first, "If-Match with the tag of an older version")
        if store.get(key) != b"second":
            raise StoreRefused(f"checkpoint.uri {store.uri}: the store does not return what was just written")
        store.delete(key)
        _expect_conflict(store, key, second, _ABSENT)
    finally:
        store.delete(key)


def _swap(store: Store, key: str, data: bytes, expected_etag: str | None) -> str:
    try:
        return store.swap(key, data, expected_etag)
    except Conflict as error:
        text = f"checkpoint.uri {store.uri}: an untouched object cannot be swapped: {error}"
        raise StoreRefused(text) from error


def _expect_conflict(store: Store, key: str, expected_etag: str | None, condition: str) -> None:
    with suppress(Conflict):
        store.swap(key, b"must fail", expected_etag)
        what = f"the store lets a write through that must fail: {condition}"
        raise StoreRefused(f"checkpoint.uri {store.uri}: {what}. {_ADVICE}")
