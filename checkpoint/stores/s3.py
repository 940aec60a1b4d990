"""S3 as a store: the `minio` client carries the data, boto3's `put_object` makes the conditional put of a
swap.

(minio 7.2 has no conditional put in its public interface.) Both use no proxies and do not retry: callers
retry visibly by `makara.checkpoint.retrying`.
"""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.awsrequest
import botocore.config
import botocore.exceptions
import botocore.session
import certifi
import minio
import minio.credentials.credentials
import minio.credentials.providers
import urllib3
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from ..errors import Conflict, NoCredentials, NotFound, StoreRefused, StoreUnavailable
from .advice import about_answer, about_connection
from .bounded_http import (
    LISTING,
    RECORD,
    SMALL,
    AnswerTooLarge,
    BoundedPools,
    Bounds,
    bounded,
    transfer,
)
from .clock_skew import describe_skew
from .credentials import S3Credentials
from .store import Store, StoredObject, Unfinished, check_key

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0  # of silence, not of the whole transfer
_MAX_CONNECTIONS = 16
_ABSENT = "NoSuchKey"
_NO_UPLOAD = "NoSuchUpload"
_PAST_END = "InvalidRange"
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


_NOT_ALLOWED = {400, 401, 403}  # an answer to HEAD has only a status, no body
_NO_REASON = "AccessDenied"  # minio's code for a 403 without a body


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
        self._pools = BoundedPools(
            maxsize=_MAX_CONNECTIONS,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=_READ_TIMEOUT_S),
            retries=False,
            ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        )
        self._clients = self._sign_in()

    @property
    def uri(self) -> str:
        return self._uri

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        with self._translated(key, transfer(len(data), answer_bytes=0)):
            self._data.put_object(self._bucket, name, io.BytesIO(data), len(data))

    def put_file(self, key: str, path: Path) -> None:
        name = self._name(key)
        size = path.stat().st_size
        with path.open("rb") as source, self._translated(key, transfer(size, answer_bytes=0)):
            self._data.put_object(self._bucket, name, source, size)

    def get(self, key: str) -> bytes:
        return self._read(key)[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(key, start, length)[0]

    def size(self, key: str) -> int:
        name = self._name(key)
        with self._translated(key):
            size = self._data.stat_object(self._bucket, name).size
        assert size is not None, "a HEAD answer without a length"
        return size

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        with self._translated(prefix, LISTING):
            found = [
                StoredObject(
                    str(item.object_name).removeprefix(self._prefix),
                    int(item.size or 0),
                    item.last_modified.timestamp() if item.last_modified is not None else 0.0,
                )
                for item in self._data.list_objects(
                    self._bucket, prefix=self._prefix + prefix, recursive=True
                )
                if not item.is_dir
            ]
        return iter(sorted(found, key=lambda stored: stored.key))

    def delete(self, key: str) -> None:
        name = self._name(key)
        with self._translated(key):
            self._data.remove_object(self._bucket, name)

    def delete_many(self, keys: Iterable[str]) -> None:
        names = [DeleteObject(self._name(key)) for key in keys]
        with self._translated("delete", LISTING):
            failed = list(self._data.remove_objects(self._bucket, names))
        if failed:
            raise self._answer(str(failed[0].name), str(failed[0].code), 0, str(failed[0].message))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        found: list[Unfinished] = []
        with self._translated(prefix, LISTING):
            pages = self._conditional.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
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
                self._conditional.abort_multipart_upload(
                    Bucket=self._bucket, Key=name, UploadId=unfinished.upload
                )
            except botocore.exceptions.ClientError as error:
                if _code(error) != _NO_UPLOAD:
                    raise

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            return self._read(key)
        except NotFound:
            return None

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        name = self._name(key)
        condition = {"IfNoneMatch": "*"} if expected_etag is None else {"IfMatch": expected_etag}
        with self._translated(key):
            try:
                answer = self._conditional.put_object(Bucket=self._bucket, Key=name, Body=data, **condition)
            except botocore.exceptions.ClientError as error:
                if _code(error) in _LOST_SWAP:
                    raise Conflict(f"{key} in {self.uri}: expected tag {expected_etag}: {error}") from error
                raise
        return str(answer["ETag"])

    @property
    def _data(self) -> minio.Minio:
        return self._clients.data

    @property
    def _conditional(self) -> Any:
        return self._clients.conditional

    @property
    def _where(self) -> str:
        return f"checkpoint.uri {self._uri}" + (f" at {self._endpoint}" if self._endpoint else "")

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, key: str, start: int = 0, length: int = 0) -> tuple[bytes, str]:
        """(the object, its tag); `length` 0 reads to its end."""
        name = self._name(key)
        bounds = transfer(length) if length else RECORD
        with self._translated(key, bounds):
            try:
                response = self._data.get_object(self._bucket, name, offset=start, length=length)
            except S3Error as error:
                if error.code == _PAST_END:
                    return b"", ""
                raise
            try:
                return response.read(), str(response.headers.get("ETag", ""))
            finally:
                response.close()
                response.release_conn()

    def _sign_in(self) -> _Clients:
        """Make clients with the current credentials. Raises `StoreRefused` if there are none, or the service
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
            data = self._data_client(credentials, region)
            conditional = self._conditional_client(session, region)
        return _Clients(data, conditional, (found.access_key, found.secret_key, found.token))

    def _renewed(self, used: _Clients) -> bool:
        """Look credentials up again after those of `used` were refused; returns whether they changed. Raises
        as `_sign_in`. Several threads may do so at once: all find the same."""
        if self._clients is used:
            found = self._sign_in()
            if found.signature == used.signature:
                return False
            self._clients = found
        return True

    def _data_client(self, credentials: Any, region: str | None) -> minio.Minio:
        url = urlsplit(self._endpoint or "https://s3.amazonaws.com")
        if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/"):
            raise StoreRefused(f"checkpoint.endpoint {self._endpoint!r}: expected http(s)://host[:port]")
        return minio.Minio(
            url.netloc,
            secure=url.scheme == "https",
            region=region,
            http_client=self._pools,
            credentials=_Boto3Credentials(credentials),
        )

    def _conditional_client(self, session: boto3.Session, region: str | None) -> Any:
        config = botocore.config.Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"} if self._endpoint else {},
            # Not every S3-compatible service knows the newer checksum headers.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = session.client("s3", endpoint_url=self._endpoint, region_name=region, config=config)
        client.meta.events.register("before-send.s3", functools.partial(_send, self._pools))
        return client

    @contextmanager
    def _translated(self, key: str, bounds: Bounds = SMALL, *, renew: bool = True) -> Generator[None]:
        """Bound all answers of a call, and translate either client's errors into ours. `renew`: look refused
        credentials up again (False during that lookup)."""
        used = self._clients if renew else None
        try:
            with bounded(bounds):
                yield
        except AnswerTooLarge as error:
            raise StoreRefused(f"{self._where}: {key}: {error}") from error
        except S3Error as error:
            status = getattr(error.response, "status", 0)
            code, message = _reason(str(error.code), str(error.message), _date(error.response))
            raise self._answer(key, code, int(status), message, used) from error
        except botocore.exceptions.ClientError as error:
            answer: dict[str, Any] = error.response.get("ResponseMetadata", {})
            date = answer.get("HTTPHeaders", {}).get("date")
            code, message = _reason(_code(error), str(error), date)
            raise self._answer(key, code, int(answer.get("HTTPStatusCode", 0)), message, used) from error
        except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
            raise StoreUnavailable(f"{self._where}: {key}: {error}{about_connection()}") from error
        except botocore.exceptions.BotoCoreError as error:
            raise StoreRefused(f"{self._where}: {key}: {error}") from error
        except (ServerError, InvalidResponseError) as error:
            raise StoreUnavailable(f"{self._where}: {key}: {error}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise StoreUnavailable(f"{self._where}: {key}: {error}{about_connection()}") from error
        except (MinioException, ValueError) as error:  # minio reports malformed names as ValueError
            raise StoreRefused(f"{self._where}: {key}: {error}") from error

    def _answer(
        self, key: str, code: str, status: int, message: str, used: _Clients | None = None
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
class _Clients:
    """Both clients, and what they sign with."""

    data: minio.Minio
    conditional: Any
    signature: tuple[str, str, str | None]


def _send(pools: BoundedPools, request: Any, **_event: object) -> botocore.awsrequest.AWSResponse:
    """Send a request of boto3 over the same bounded connections as minio's."""
    answer: Any = pools.urlopen(
        request.method,
        request.url,
        redirect=False,
        body=request.body,
        headers=request.headers,
        preload_content=False,
        decode_content=False,
    )
    received = botocore.awsrequest.AWSResponse(request.url, answer.status, answer.headers, answer)
    if not request.stream_output:
        _ = received.content  # read now, within the bounds of this call
    return received


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


class _Boto3Credentials(minio.credentials.providers.Provider):
    """boto3's credentials, renewed when boto3 renews them, so that both clients sign as the same user."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def retrieve(self) -> minio.credentials.credentials.Credentials:
        frozen = self._credentials.get_frozen_credentials()
        return minio.credentials.credentials.Credentials(frozen.access_key, frozen.secret_key, frozen.token)


def _reason(code: str, message: str, date: str | None) -> tuple[str, str]:
    """(code, message) of a refusal answered at `date`; if this machine's clock is wrong, they say by how
    much."""
    skew = describe_skew(date, time.time()) if code in (_SKEWED, _NO_REASON) else None
    return (code, message) if skew is None else (_SKEWED, f"{skew}: {message}")


def _date(response: Any) -> str | None:
    return response.headers.get("Date") if response is not None else None


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
