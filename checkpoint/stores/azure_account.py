"""An account of Azure Blob Storage: its address, its credentials, and its client.

The client uses no proxies and does not retry: callers retry visibly by `makara.checkpoint.retrying`. (If a
download's connection breaks midway, azure-storage-blob itself repeats the request, twice at most.)
"""

from __future__ import annotations

import base64
import logging
import os
import re
from typing import Any
from urllib.parse import urlsplit

import requests
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential, TokenCredential
from azure.core.exceptions import AzureError, ClientAuthenticationError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import ContainerClient
from requests.adapters import HTTPAdapter

from ..errors import NoCredentials, StoreRefused, StoreUnavailable
from .advice import about_connection
from .azure_hosts import is_azure
from .bounded_http import BoundedPools
from .credentials import AZURE_IDENTITY, AzureCredentials, credential_names, credentials_in

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0  # of silence, not of the whole transfer
_MAX_CONNECTIONS = 16
_WHOLE_BYTES = 1 << 40  # a download is one request, however large
_SCOPE = "https://storage.azure.com/.default"

Signer = AzureNamedKeyCredential | AzureSasCredential | TokenCredential


def open_container(container: str, endpoint: str, given: AzureCredentials | None) -> ContainerClient:
    """Open a client of `container` that signs with `given`, else with credentials of the environment or
    machine.

    Raises `StoreRefused` for an invalid address or credentials, `NoCredentials` if there are none,
    `StoreUnavailable` if the service that issues them does not answer.
    """
    quieten()
    url = account_url(endpoint)
    signer = _signer(url, given or _in_environment())
    session = requests.Session()
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter(pool_maxsize=_MAX_CONNECTIONS, max_retries=0))
    session.headers["Accept-Encoding"] = "identity"
    transport = RequestsTransport(
        session=session,
        connection_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        connection_verify=os.environ.get("SSL_CERT_FILE") or True,
    )
    return ContainerClient(
        url,
        container,
        credential=signer,
        transport=transport,
        retry_total=0,
        max_single_get_size=_WHOLE_BYTES,
    )


class _BoundedAdapter(HTTPAdapter):
    """Connections of requests whose answers are bounded."""

    def init_poolmanager(
        self, connections: int, maxsize: int, block: bool = False, **pool_kwargs: Any
    ) -> None:
        self.poolmanager = BoundedPools(num_pools=connections, maxsize=maxsize, block=block, **pool_kwargs)


def account_url(endpoint: str) -> str:
    """The normalised address of the account. Raises `StoreRefused`."""
    parts = urlsplit(endpoint)
    whole = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.username
    path = parts.path.strip("/")
    if not whole or "/" in path or bool(path) == is_azure(endpoint):
        raise StoreRefused(
            f"checkpoint.endpoint {endpoint.partition('?')[0]!r}: expected "
            "https://<account>.blob.core.windows.net, or http(s)://host[:port]/<account> for Azurite"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}" + (f"/{path}" if path else "")


def quieten() -> None:
    """Keep requests out of the log: the client logs each at INFO, and the connection pool at DEBUG, with the
    signature of a SAS."""
    logging.getLogger("azure").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.INFO)


def _in_environment() -> AzureCredentials | None:
    found = credentials_in("az://", os.environ)
    return found if isinstance(found, AzureCredentials) else None


def _signer(url: str, given: AzureCredentials | None) -> Signer:
    if given is None:
        return _identity(url)
    if given.connection_string is not None:
        given = _parsed(given.connection_string, url)
    if given.key is not None:
        return AzureNamedKeyCredential(_account_name(url), _checked(given.key))
    if given.sas is not None and "sig=" in given.sas:
        return AzureSasCredential(given.sas.removeprefix("?"))
    raise StoreRefused("AZURE_STORAGE_SAS_TOKEN is no shared access signature; expected sv=...&sig=...")


def _account_name(url: str) -> str:
    parts = urlsplit(url)
    return parts.path.strip("/") or (parts.hostname or "").partition(".")[0]


def _checked(key: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        raise StoreRefused("AZURE_STORAGE_KEY is no key of an account; expected base64") from None
    return key


def _parsed(connection_string: str, url: str) -> AzureCredentials:
    """The key or signature in a connection string of the account at `url`. Raises `StoreRefused`."""
    name = "AZURE_STORAGE_CONNECTION_STRING"
    pairs = (pair.partition("=") for pair in connection_string.strip().strip(";").split(";"))
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    key, sas = values.get("accountkey"), values.get("sharedaccesssignature")
    suffix = values.get("endpointsuffix", "core.windows.net")
    protocol, account = values.get("defaultendpointsprotocol", "https"), values.get("accountname")
    endpoint = values.get("blobendpoint") or (f"{protocol}://{account}.blob.{suffix}" if account else None)
    if endpoint is None or not (key or sas):
        raise StoreRefused(f"{name} is incomplete; expected AccountName=...;AccountKey=... as Azure shows it")
    if account_url(endpoint) != url:
        raise StoreRefused(f"{name} is of {account_url(endpoint)}, and checkpoint.endpoint is {url}")
    return AzureCredentials(key=key, sas=sas)


def _identity(url: str) -> TokenCredential:
    """The identity of this machine or environment; only for Azure's own hosts, since another receiver of its
    token could use it elsewhere."""
    names = credential_names("az://")
    if not is_azure(url):
        raise NoCredentials(f"checkpoint.endpoint {url}: is not Azure's own, and none of {names} is set")
    from azure.identity import DefaultAzureCredential  # here, as it takes half a second to import

    identity = DefaultAzureCredential(
        exclude_shared_token_cache_credential=True,
        exclude_visual_studio_code_credential=True,
        exclude_powershell_credential=True,
        exclude_developer_cli_credential=True,
        exclude_broker_credential=True,
    )
    try:
        identity.get_token(_SCOPE)
    except ClientAuthenticationError as error:
        if any(os.environ.get(name) for name in AZURE_IDENTITY):
            raise StoreRefused(f"checkpoint.endpoint {url}: credentials: {error.message}") from None
        raise NoCredentials(
            f"checkpoint.endpoint {url}: no credentials: this process has none of {names} in its "
            "environment, nor an identity of its machine"
        ) from None
    except AzureError as error:
        words = re.sub(r"\s+", " ", error.message)
        raise StoreUnavailable(
            f"checkpoint.endpoint {url}: credentials: {words}{about_connection()}"
        ) from None
    return identity
