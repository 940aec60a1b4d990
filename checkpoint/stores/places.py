"""Which store an address means, and whether it can be written to."""

from __future__ import annotations

import uuid
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import Conflict, StoreRefused
from .credentials import Credentials
from .local import LocalStore
from .store import Store


def open_store(
    uri: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    credentials: Credentials | None = None,
) -> Store:
    """The store at `uri`: `file:///abs/path` or `s3://bucket/prefix`. Nothing is read or written yet.

    `endpoint`: URL of an S3-compatible service (None: AWS). `credentials` None: they are found as boto3
    finds them, AWS_ACCESS_KEY_ID and its companions first. Raises `StoreRefused` when the URI is malformed.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StoreRefused(f"checkpoint.uri {uri!r}: a local folder is written file:///absolute/path")
        return LocalStore(Path(unquote(parts.path)), uri.rstrip("/"))
    if parts.scheme == "s3":
        from .s3 import S3Store  # here, so that a local job never pays for importing boto3

        if not parts.netloc:
            raise StoreRefused(f"checkpoint.uri {uri!r}: expected s3://bucket or s3://bucket/prefix")
        prefix = parts.path.strip("/")
        return S3Store(parts.netloc, prefix, endpoint=endpoint, region=region, credentials=credentials)
    raise StoreRefused(f"checkpoint.uri {uri!r}: expected file:///absolute/path or s3://bucket/prefix")


def check_writable(
    uri: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    credentials: Credentials | None = None,
    make_folders: bool = True,
) -> None:
    """Write, swap, read and delete a small object, so that a job is refused now and not at its first
    checkpoint. `make_folders` False: of a local folder that is not there, look whether it could be made.

    Raises `StoreRefused` also for a store that ignores the conditions of a swap: without them a writer of an
    old generation could not be fenced off. Raises `StoreUnavailable` when the store does not answer.
    """
    store = open_store(uri, endpoint=endpoint, region=region, credentials=credentials)
    if not make_folders and isinstance(store, LocalStore) and store.could_be_made():
        return
    key = f"probe-{uuid.uuid4().hex}"
    etag = store.swap(key, b"first", None)
    try:
        store.swap(key, b"second", etag)
        for stale in (None, etag):
            try:
                store.swap(key, b"stale", stale)
            except Conflict:
                continue
            raise StoreRefused(f"checkpoint.uri {uri}: the store ignores If-Match or If-None-Match")
        if store.get(key) != b"second":
            raise StoreRefused(f"checkpoint.uri {uri}: the store does not return what was just written")
    except Conflict as error:
        raise StoreRefused(f"checkpoint.uri {uri}: an untouched object cannot be swapped: {error}") from error
    finally:
        store.delete(key)
