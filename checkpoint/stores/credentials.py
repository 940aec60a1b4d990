"""Credentials that a caller gives to a store, instead of those that its client would find by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_KEY, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_AZURE_KEY, _AZURE_SAS = "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"
_AZURE_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
AZURE_CREDENTIALS = (_AZURE_CONNECTION, _AZURE_KEY, _AZURE_SAS)
CREDENTIALS = (_KEY, _SECRET, _TOKEN, *AZURE_CREDENTIALS)  # what `credentials_in` reads
# Variables by which clients find keys. A job with keys of its own must not get any of the manager's.
_S3_VARIABLES = (
    _KEY,
    _SECRET,
    _TOKEN,
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
AZURE_IDENTITY = (
    "AZURE_TENANT_ID",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE_PATH",
    "AZURE_CLIENT_CERTIFICATE_PASSWORD",
    "AZURE_USERNAME",
    "AZURE_PASSWORD",
    "AZURE_FEDERATED_TOKEN_FILE",
)


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """An access key and its secret, never shown in a log."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AzureCredentials:
    """A connection string, an account's key, or a shared access signature; never shown in a log.

    If several are given, the first counts, as for Azure's own command line.
    """

    connection_string: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)


Credentials = S3Credentials | AzureCredentials


def credentials_in(uri: str, environment: Mapping[str, str]) -> Credentials | None:
    """The keys for a store at `uri` in these variables; None if they are missing or incomplete."""
    match uri.partition("://")[0]:
        case "s3":
            return _s3(environment)
        case "az":
            return _azure(environment)
        case _:
            return None


def credential_names(uri: str) -> str:
    """The names of the variables that hold the keys of a store at `uri`, for a message."""
    if uri.startswith("az://"):
        return f"{_AZURE_KEY}, {_AZURE_SAS} or {_AZURE_CONNECTION}"
    return f"{_KEY} and {_SECRET}"


def inherited(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """`environment` updated by `own`; if `own` has keys for a kind of store, others for it are dropped."""
    left_out = {
        *(_S3_VARIABLES if _s3(own) is not None else ()),
        *((*AZURE_CREDENTIALS, *AZURE_IDENTITY) if _azure(own) is not None else ()),
    }
    return {**{name: value for name, value in environment.items() if name not in left_out}, **own}


def _s3(environment: Mapping[str, str]) -> S3Credentials | None:
    if not environment.get(_KEY) or not environment.get(_SECRET):
        return None
    return S3Credentials(environment[_KEY], environment[_SECRET], environment.get(_TOKEN) or None)


def _azure(environment: Mapping[str, str]) -> AzureCredentials | None:
    values = [environment.get(name) or None for name in AZURE_CREDENTIALS]
    return AzureCredentials(*values) if any(values) else None
