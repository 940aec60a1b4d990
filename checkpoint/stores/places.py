"""Opens the store of an address, and checks that it can be written to."""

from __future__ import annotations

import uuid

from ..errors import StoreRefused
from .conditions import check_conditions
from .credentials import AzureCredentials, Credentials, S3Credentials
from .local import LocalStore
from .store import Store
from .uri import StoreUri


def open_store(
    uri: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    credentials: Credentials | None = None,
) -> Store:
    """Open the store at `uri`: `file:///abs/path`, `s3://bucket/prefix` or `az://container/prefix`. Reads and
    writes nothing yet.

    `endpoint`: URL of an S3-compatible service (None: AWS), or of an account of Azure Blob Storage.
    `credentials` None: taken from the environment (AWS_ACCESS_KEY_ID, AZURE_STORAGE_KEY and related ones),
    else as boto3 and azure-identity find them. Raises `StoreRefused` if the URI is malformed.
    """
    address = StoreUri.of(uri)
    folder = address.folder
    if folder is not None:
        if address.container not in ("", "localhost") or not folder.is_absolute():
            raise StoreRefused(f"checkpoint.uri {uri!r}: a local folder is written file:///absolute/path")
        return LocalStore(folder, f"file://{address.path.rstrip('/')}")
    if address.scheme == "s3":
        from .s3 import S3Store  # here, so that a local job does not import boto3

        if not address.container:
            raise StoreRefused(f"checkpoint.uri {uri!r}: expected s3://bucket or s3://bucket/prefix")
        assert credentials is None or isinstance(credentials, S3Credentials)
        return S3Store(
            address.container, address.prefix, endpoint=endpoint, region=region, credentials=credentials
        )
    if address.scheme == "az":
        assert credentials is None or isinstance(credentials, AzureCredentials)
        return _azure_store(uri, address.container, address.prefix, endpoint, credentials)
    expected = "expected file:///absolute/path, s3://bucket/prefix or az://container/prefix"
    raise StoreRefused(f"checkpoint.uri {uri!r}: {expected}")


def _azure_store(
    uri: str, container: str, prefix: str, endpoint: str | None, credentials: AzureCredentials | None
) -> Store:
    if not container:
        raise StoreRefused(f"checkpoint.uri {uri!r}: expected az://container or az://container/prefix")
    if endpoint is None:
        raise StoreRefused(
            "checkpoint.endpoint: expected the account, https://<account>.blob.core.windows.net"
        )
    try:
        from .azure import AzureStore  # here, as its client is an extra
    except ModuleNotFoundError as error:
        lacks = f"az:// needs {error.name}, which is not installed here: pip install 'makara[azure]'"
        raise StoreRefused(f"checkpoint.uri {uri!r}: {lacks}") from error
    return AzureStore(container, prefix, endpoint=endpoint, credentials=credentials)


def check_writable(
    uri: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    credentials: Credentials | None = None,
    make_folders: bool = True,
) -> None:
    """Write, swap, read and delete a small object, so that a job is refused now and not at its first
    checkpoint. With `make_folders=False`, only check that a missing local folder could be created.

    Raises `StoreRefused`, also if the store ignores the conditions of a swap, which fencing needs. Raises
    `StoreUnavailable` if the store does not answer.
    """
    store = open_store(uri, endpoint=endpoint, region=region, credentials=credentials)
    if not make_folders and isinstance(store, LocalStore) and store.could_be_made():
        return
    check_conditions(store, f"probe-{uuid.uuid4().hex}")
