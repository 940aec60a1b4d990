"""Azure Blob Storage as a store: block blobs, with conditional puts for a swap.

An object larger than one block is sent as blocks with ids unique to its writer, and appears when their list
is committed. Two writers of one key cannot mix blocks: the one that commits second finds its blocks gone.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobClient

from ..errors import Conflict, NotFound
from .azure_account import open_container
from .azure_answers import ABSENT, LOST_SWAP, PAST_END, code_of, translated
from .bounded_http import LISTING, RECORD, transfer
from .credentials import AzureCredentials
from .store import Store, StoredObject, Unfinished, check_key

T = TypeVar("T")

_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 50_000  # of a blob (Azure, scalability targets)
_UPLOADS = 3  # blocks of an object in flight, and in memory, at a time
_DELETIONS = 8  # at a time
_PAGE = 5000  # names in one answer of a listing; Azure's own limit


class AzureStore(Store):
    """Objects below `prefix` of `container`, which must exist."""

    def __init__(
        self,
        container: str,
        prefix: str,
        *,
        endpoint: str,
        credentials: AzureCredentials | None = None,
    ) -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._uri = f"az://{container}/{prefix}".rstrip("/")
        self._where = f"checkpoint.uri {self._uri} at {endpoint}"
        with translated(self._where, "client"):
            self._container = open_container(container, endpoint, credentials)

    @property
    def uri(self) -> str:
        return self._uri

    def put(self, key: str, data: bytes) -> None:
        view = memoryview(data)
        self._write(key, len(data), lambda start, length: bytes(view[start : start + length]))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            descriptor = source.fileno()
            size = os.fstat(descriptor).st_size
            self._write(key, size, lambda start, length: os.pread(descriptor, length, start))

    def get(self, key: str) -> bytes:
        return self._read(key)[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        blob = self._blob(key)
        with translated(self._where, key, transfer(length)):
            try:
                return blob.download_blob(offset=start, length=length).readall()
            except HttpResponseError as error:
                if code_of(error) == PAST_END:
                    return b""
                raise

    def size(self, key: str) -> int:
        blob = self._blob(key)
        with translated(self._where, key):
            return int(blob.get_blob_properties().size)

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        return iter(sorted(self._listed(prefix), key=lambda stored: stored.key))

    def delete(self, key: str) -> None:
        blob = self._blob(key)
        with translated(self._where, key):
            try:
                blob.delete_blob(delete_snapshots="include")
            except HttpResponseError as error:
                if code_of(error) != ABSENT:
                    raise

    def delete_many(self, keys: Iterable[str]) -> None:
        wanted = [check_key(key) for key in keys]
        with ThreadPoolExecutor(_DELETIONS) as pool:
            _all_done(pool, self.delete, wanted)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        begun = {found.key for found in self._listed(prefix, "uncommittedblobs")}
        begun -= {found.key for found in self._listed(prefix)}  # committed ones, some since the first list
        return iter([unfinished for key in sorted(begun) for unfinished in self._begun(key)])

    def abort(self, unfinished: Unfinished) -> None:
        """Commit an empty list of blocks if there is no object yet, which drops all uncommitted blocks."""
        key = unfinished.key
        if unfinished.upload not in [found.upload for found in self._begun(key)]:
            return
        blob = self._blob(key)
        with translated(self._where, key):
            try:
                empty = blob.commit_block_list([], match_condition=MatchConditions.IfMissing)
                blob.delete_blob(etag=str(empty["etag"]), match_condition=MatchConditions.IfNotModified)
            except HttpResponseError as error:
                if code_of(error) not in LOST_SWAP:  # else that write ended, or another began since
                    raise

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            return self._read(key)
        except NotFound:
            return None

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        blob = self._blob(key)
        with translated(self._where, key):
            try:
                if expected_etag is None:
                    answer = blob.upload_blob(data, overwrite=False)
                else:
                    condition = MatchConditions.IfNotModified
                    answer = blob.upload_blob(
                        data, overwrite=True, etag=expected_etag, match_condition=condition
                    )
            except HttpResponseError as error:
                if code_of(error) in LOST_SWAP:
                    code = code_of(error)
                    raise Conflict(f"{key} in {self.uri}: expected tag {expected_etag}: {code}") from None
                raise
        return str(answer["etag"])

    def _blob(self, key: str) -> BlobClient:
        return self._container.get_blob_client(self._prefix + check_key(key))

    def _read(self, key: str) -> tuple[bytes, str]:
        blob = self._blob(key)
        with translated(self._where, key, RECORD):
            download = blob.download_blob()
            return download.readall(), str(download.properties.etag)

    def _listed(self, prefix: str, *include: str) -> list[StoredObject]:
        with translated(self._where, prefix, LISTING):
            found: Iterable[Any] = self._container.list_blobs(
                name_starts_with=self._prefix + prefix, include=[*include], results_per_page=_PAGE
            )
            return [
                StoredObject(
                    str(item.name).removeprefix(self._prefix),
                    int(item.size or 0),  # uncommitted blobs have neither size nor time
                    item.last_modified.timestamp() if item.last_modified else 0.0,
                )
                for item in found
            ]

    def _begun(self, key: str) -> list[Unfinished]:
        """Uploads of ours to `key` that are not committed; Azure itself drops others after a week."""
        blob = self._blob(key)
        try:
            with translated(self._where, key):
                _, blocks = blob.get_block_list("uncommitted")
        except NotFound:
            return []
        uploads = {str(block.id).rpartition("-")[0] for block in blocks}
        return [
            Unfinished(key, began_at, upload)
            for upload in sorted(uploads)
            if (began_at := _began_at(upload)) is not None
        ]

    def _write(self, key: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """Write a whole object, in one request or by blocks; `read(start, length)` gives its bytes."""
        blob = self._blob(key)
        with translated(self._where, key, transfer(size, answer_bytes=0)):
            if size <= _BLOCK_BYTES:
                blob.upload_blob(read(0, size), overwrite=True)
                return
            length = max(_BLOCK_BYTES, math.ceil(size / _MOST_BLOCKS))
            upload = _upload_id(time.time())
            ids = [f"{upload}-{number:06d}" for number in range(math.ceil(size / length))]

            def send(number: int) -> None:
                blob.stage_block(ids[number], read(number * length, length))

            with ThreadPoolExecutor(_UPLOADS) as pool:
                _all_done(pool, send, range(len(ids)))
            blob.commit_block_list([BlobBlock(block) for block in ids])


def _all_done(pool: ThreadPoolExecutor, call: Callable[[T], None], values: Iterable[T]) -> None:
    """Call for each value in the pool. After a failure, which is raised, no further call begins."""
    try:
        for _ in pool.map(call, values):
            pass
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _upload_id(now: float) -> str:
    """The id of a new upload, which encodes when it began: Azure lists only ids of uncommitted blocks."""
    return f"makara-{int(now):012d}-{uuid.uuid4().hex[:16]}"


def _began_at(upload: str) -> float | None:
    """Unix second; None if the id is not one of ours."""
    words = upload.split("-")
    return float(words[1]) if len(words) == 3 and words[0] == "makara" and words[1].isdigit() else None
