"""S3 as a store, by boto3. It uses no proxies and does not retry: callers retry visibly by
`makara.checkpoint.retrying`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import botocore.parsers
import botocore.session
import urllib3.exceptions
from boto3.s3.transfer import TransferConfig

from ..errors import Conflict, NoCredentials, NotFound, StoreRefused, StoreUnavailable
from .advice import about_answer, about_connection
from .clock_skew import describe_skew
from .credentials import S3Credentials
from .store import Store, StoredObject, Unfinished, check_key

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0  # of silence, not of the whole transfer
_MAX_CONNECTIONS = 16
_PART_BYTES = 8 << 20  # of a file's upload
_UPLOADS = 3  # parts of a file in flight, and in memory, at a time
_DELETIONS = 1000  # names in one request; S3's own limit
_ABSENT = "NoSuchKey"
_NO_UPLOAD = "NoSuchUpload"
_SKEWED = "RequestTimeTooSkewed"
_LOST_SWAP = {"PreconditionFailed", "ConditionalRequestConflict", "412", _ABSENT}
# 4xx codes that say "not now" (AWS, Error responses).
_TRANSIENT = {
    "SlowDown",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "OperationAborted",
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "ServiceUnavailable",
    _SKEWED,  # one of the clocks is wrong, and may be corrected
    _NO_UPLOAD,  # it was aborted meanwhile and may begin again
    "InvalidPart",
}
# 4xx codes about the credentials rather than the request.
_STALE_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
    "InvalidToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
}


_NO_REASON = "AccessDenied"
_BY_STATUS = {"403": _NO_REASON, "404": _ABSENT}  # an answer to HEAD has only a status, no body
_NOT_ALLOWED = {400, 401, 403}


class S3Store(Store):
    """Objects below `prefix` of `bucket`, which must exist."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint: str | None,
        region: str | None,
        credentials: S3Credentials | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._endpoint = endpoint
        self._region = region
        self._given = credentials
        self._signed_in = self._sign_in()

    @property
    def uri(self) -> str:
        return self._uri

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        with self._translated(key):
            self._client.put_object(Bucket=self._bucket, Key=name, Body=data)

    def put_file(self, key: str, path: Path) -> None:
        name = self._name(key)
        with path.open("rb") as source, self._translated(key):
            self._client.upload_fileobj(source, self._bucket, name, Config=_transfer())

    def get(self, key: str) -> bytes:
        name = self._name(key)
        with self._translated(key):
            return self._read(name)[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        name = self._name(key)
        with self._translated(key):
            return self._read(name, Range=f"bytes={start}-{start + length - 1}")[0]

    def size(self, key: str) -> int:
        name = self._name(key)
        with self._translated(key):
            return int(self._client.head_object(Bucket=self._bucket, Key=name)["ContentLength"])

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        with self._translated(prefix):
            found = [
                StoredObject(
                    str(item["Key"]).removeprefix(self._prefix),
                    item["Size"],
                    item["LastModified"].timestamp(),
                )
                for page in self._pages("list_objects_v2", prefix)
                for item in page.get("Contents", [])
            ]
        return iter(sorted(found, key=lambda stored: stored.key))

    def delete(self, key: str) -> None:
        name = self._name(key)
        with self._translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def delete_many(self, keys: Iterable[str]) -> None:
        names = [{"Key": self._name(key)} for key in keys]
        for start in range(0, len(names), _DELETIONS):
            some = {"Objects": names[start : start + _DELETIONS], "Quiet": True}
            with self._translated("delete"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=some)
            for failed in answer.get("Errors", []):
                raise self._answer(failed["Key"], failed["Code"], 0, failed.get("Message", ""))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        found: list[Unfinished] = []
        with self._translated(prefix):
            for page in self._pages("list_multipart_uploads", prefix):
                for upload in page.get("Uploads", []):
                    name = str(upload["Key"])
                    if name.startswith(self._prefix + prefix):
                        key = name.removeprefix(self._prefix)
                        found.append(Unfinished(key, upload["Initiated"].timestamp(), upload["UploadId"]))
        return iter(sorted(found, key=lambda unfinished: unfinished.key))

    def abort(self, unfinished: Unfinished) -> None:
        name = self._name(unfinished.key)
        with self._translated(unfinished.key):
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=unfinished.upload)
            except botocore.exceptions.ClientError as error:
                if _code(error) != _NO_UPLOAD:
                    raise

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        name = self._name(key)
        try:
            with self._translated(key):
                return self._read(name)
        except NotFound:
            return None

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        name = self._name(key)
        condition = {"IfNoneMatch": "*"} if expected_etag is None else {"IfMatch": expected_etag}
        with self._translated(key):
            try:
                answer = self._client.put_object(Bucket=self._bucket, Key=name, Body=data, **condition)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _LOST_SWAP:
                    raise Conflict(f"{key} in {self.uri}: expected tag {expected_etag}: {error}") from error
                raise
        return str(answer["ETag"])

    @property
    def _client(self) -> Any:
        return self._signed_in.client

    @property
    def _where(self) -> str:
        return f"checkpoint.uri {self._uri}" + (f" at {self._endpoint}" if self._endpoint else "")

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, name: str, **part: str) -> tuple[bytes, str]:
        """Read the object, or `part` of it."""
        answer = self._client.get_object(Bucket=self._bucket, Key=name, **part)
        with answer["Body"] as body:
            return body.read(), str(answer["ETag"])

    def _pages(self, listing: str, prefix: str) -> Iterable[Any]:
        pages = self._client.get_paginator(listing)
        return pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)

    def _sign_in(self) -> _SignedIn:
        """Make a client with the current credentials. Raises `StoreRefused` if there are none, or the service
        that issues them refuses."""
        with self._translated("credentials", renew=False):
            session = _session(self._region, self._given)
            credentials = session.get_credentials()
        if credentials is None:
            raise NoCredentials(
                f"{self._where}: no credentials: this process has neither AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in its environment, nor a profile or a role of its machine"
            )
        # A self-hosted service has no regions, but a signature needs one.
        region = session.region_name or ("us-east-1" if self._endpoint else None)
        with self._translated("credentials", renew=False):
            found = credentials.get_frozen_credentials()
        with self._translated("client", renew=False):
            client = self._new_client(session, region)
        return _SignedIn(client, (found.access_key, found.secret_key, found.token))

    def _renewed(self, used: _SignedIn) -> bool:
        """Look credentials up again after those of `used` were refused; returns whether they changed. Raises
        as `_sign_in`. Several threads may do so at once: all find the same."""
        if self._signed_in is used:
            found = self._sign_in()
            if found.signature == used.signature:
                return False
            self._signed_in = found
        return True

    def _new_client(self, session: boto3.Session, region: str | None) -> Any:
        url = urlsplit(self._endpoint or "https://s3.amazonaws.com")
        if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/"):
            raise StoreRefused(f"checkpoint.endpoint {self._endpoint!r}: expected http(s)://host[:port]")
        config = botocore.config.Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},
            max_pool_connections=_MAX_CONNECTIONS,
            proxies={},
            s3={"addressing_style": "path"} if self._endpoint else {},
            # Not every S3-compatible service knows the newer checksum headers.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        trusted = os.environ.get("SSL_CERT_FILE")  # None: as botocore does
        client: Any = session.client(
            "s3", endpoint_url=self._endpoint, region_name=region, config=config, verify=trusted
        )
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        return client

    @contextmanager
    def _translated(self, key: str, *, renew: bool = True) -> Generator[None]:
        """Translate boto3's errors into ours. `renew`: look refused credentials up again (False during that
        lookup)."""
        used = self._signed_in if renew else None
        try:
            yield
        except botocore.exceptions.ClientError as error:
            answer: dict[str, Any] = error.response.get("ResponseMetadata", {})
            date = answer.get("HTTPHeaders", {}).get("date")
            code, message = _reason(error, date)
            raise self._answer(key, code, int(answer.get("HTTPStatusCode", 0)), message, used) from error
        except (botocore.exceptions.IncompleteReadError, botocore.parsers.ResponseParserError) as error:
            raise StoreUnavailable(f"{self._where}: {key}: {error}") from error
        except (
            botocore.exceptions.HTTPClientError,
            botocore.exceptions.ConnectionError,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            raise StoreUnavailable(f"{self._where}: {key}: {error}{about_connection()}") from error
        except (botocore.exceptions.BotoCoreError, ValueError) as error:  # malformed names and endpoints
            raise StoreRefused(f"{self._where}: {key}: {error}") from error

    def _answer(
        self, key: str, code: str, status: int, message: str, used: _SignedIn | None = None
    ) -> Exception:
        if code == _ABSENT:
            return NotFound(f"{key} in {self.uri}: no such object")
        transient = status == 429 or (
            status >= 500 and status != 501
        )  # 501: the service lacks this operation
        if transient or code in _TRANSIENT:
            return StoreUnavailable(f"{self._where}: {key}: {code}: {message}{about_answer(code, status)}")
        stale = code in _STALE_CREDENTIALS or status in _NOT_ALLOWED
        if stale and used is not None and self._renewed(used):
            return StoreUnavailable(f"{self._where}: {key}: {code}: {message} (credentials were taken anew)")
        return StoreRefused(f"{self._where}: {key}: {code}: {message}{about_answer(code, status)}")


@dataclass(frozen=True)
class _SignedIn:
    """A client, and what it signs with."""

    client: Any
    signature: tuple[str, str, str | None]


@functools.cache
def _service_models() -> Any:
    """botocore's model of S3: read once, because that takes 50 ms and each command opens a store."""
    return botocore.session.get_session().get_component("data_loader")


def _session(region: str | None, given: S3Credentials | None) -> boto3.Session:
    """A new session with the given credentials, else with credentials looked up now."""
    core = botocore.session.get_session()
    core.register_component("data_loader", _service_models())
    if given is None:
        return boto3.Session(botocore_session=core, region_name=region)
    return boto3.Session(
        botocore_session=core,
        region_name=region,
        aws_access_key_id=given.access_key,
        aws_secret_access_key=given.secret_key,
        aws_session_token=given.session_token,
    )


def _transfer() -> TransferConfig:
    config = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_UPLOADS
    )
    config.max_in_memory_upload_chunks = _UPLOADS
    return config


def _add_md5(request: Any, **_: Any) -> None:
    """Not every S3-compatible service takes the newer checksum in place of this one."""
    request.headers["Content-MD5"] = base64.b64encode(
        hashlib.md5(request.body, usedforsecurity=False).digest()
    ).decode()


def _reason(error: botocore.exceptions.ClientError, date: str | None) -> tuple[str, str]:
    """(code, message) of a refusal answered at `date`; if this machine's clock is wrong, they say by how
    much."""
    code = _code(error)
    message = str(error.response.get("Error", {}).get("Message") or error)
    skew = describe_skew(date, time.time()) if code in (_SKEWED, _NO_REASON) else None
    return (code, message) if skew is None else (_SKEWED, f"{skew}: {message}")


def _code(error: botocore.exceptions.ClientError) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    return _BY_STATUS.get(code, code)
