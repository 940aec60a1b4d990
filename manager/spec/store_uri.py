"""Checks of a job's store URI, and of an administrator's `allow_stores`, without contacting the store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from ...checkpoint import StoreUri, is_azure

Fault = tuple[str, str]

AWS = "s3://"  # any bucket there
AZURE = "az://"  # any account of its public cloud
EVERY_FOLDER = "file:///"
_AWS_HOST = re.compile(r"s3([.-](dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
_AZURE_ENDPOINT = "https://<account>.blob.core.windows.net"
_PORTS = {"http": 80, "https": 443}


def is_absolute(uri: str) -> bool:
    """Whether `uri` means the same in every folder."""
    return uri.startswith(("file:///", "s3://", "az://"))


def place_of(
    uri: str, own_uri: str, endpoint: str | None, region: str | None
) -> tuple[str | None, str | None]:
    """(endpoint, region) of a job at `own_uri`, reused for another store at `uri` if both are of one kind."""
    return (endpoint, region) if _scheme(uri) == _scheme(own_uri) else (None, None)


def _scheme(uri: str) -> str:
    return uri.partition("://")[0]


def uri_faults(uri: str, endpoint: str | None, region: str | None) -> list[Fault]:
    """[(field, message)]: faults of these three fields of a job file's `checkpoint`."""
    address = StoreUri.of(uri)
    fault = _character_fault(uri) or _user_fault(address)
    if fault:
        return [("checkpoint.uri", fault)]
    match address.scheme:
        case "s3":
            return _s3_faults(uri, endpoint, region)
        case "az":
            return _azure_faults(uri, endpoint, region)
        case "" | "file":
            fault = _folder_fault(uri, address)
        case scheme:
            expected = "expected a path, file:///path, s3://bucket/prefix or az://container/prefix"
            fault = f"{uri!r} has scheme {scheme!r}; {expected}"
    if fault:
        return [("checkpoint.uri", fault)]
    given = {"endpoint": endpoint, "region": region}
    message = "has no meaning with a folder; leave it out"
    return [(f"checkpoint.{name}", message) for name, value in given.items() if value is not None]


def _character_fault(uri: str) -> str:
    if "\0" in unquote(uri):
        return f"{uri!r} holds a NUL character, which no name can"
    if re.search(r"[\x00-\x1f\x7f]", uri):
        return f"{uri!r} holds a line break or another control character; leave it out"
    return ""


def _user_fault(address: StoreUri) -> str:
    """Why a URI may name no user: it is shown and stored, a password in it as well (so it is not shown)."""
    user, at, _ = address.container.rpartition("@")
    if not at:
        return ""
    what = "a user and a password" if ":" in user else "a user"
    return f"names {what} before an @; leave them out: keys of a store are named in `secrets`"


def _folder_fault(uri: str, address: StoreUri) -> str:
    """Why a path or a `file` URI would open another folder than was meant; empty if it would not."""
    if address.scheme == "file":
        if address.container:
            return f"{uri!r} names a host; expected file:///absolute/path"
        if unquote(address.path).startswith("/~"):
            return f"{uri!r}: ~ means nothing in a URI; write the path alone, {unquote(address.path)[1:]!r}"
        return ""
    if scheme := re.match(r"(file|s3|az|https?|gs|abfss?|wasbs?):", uri, re.IGNORECASE):
        expected = "expected file:///path, s3://bucket/prefix or az://container/prefix"
        return f"{uri!r} lacks slashes after {scheme[0]!r}; {expected} (a folder of this name: ./{uri})"
    if re.match(r"\$\{?[A-Za-z_]", uri):
        return f"{uri!r}: variables are not expanded in a job file; write the path, or begin it with ~/"
    return ""


def _s3_faults(uri: str, endpoint: str | None, region: str | None) -> list[Fault]:
    faults: list[Fault] = []
    if not _is_bucket(StoreUri.of(uri).container):
        faults.append(("checkpoint.uri", f"{uri!r} names no bucket; expected s3://bucket/prefix"))
    faults += _segment_faults(uri, "s3://bucket/a/b")
    if endpoint is not None and (not _is_endpoint(endpoint) or re.search(r"[?#@]", endpoint)):
        shown = re.sub(r"//.*@", "//...@", endpoint)  # a password may stand there
        message = f"{shown!r} is no address; expected http(s)://host[:port]"
        faults.append(("checkpoint.endpoint", message))
    if region is not None and not re.fullmatch(r"[a-z0-9-]{1,63}", region):
        message = f"{region!r} is no region; expected a name such as eu-central-1"
        faults.append(("checkpoint.region", message))
    return faults


def _is_bucket(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+", name, re.ASCII) is not None


def _segment_faults(uri: str, expected: str) -> list[Fault]:
    segments = uri.partition("://")[2].rstrip("/").split("/")
    if not any(segment in ("", ".", "..") for segment in segments[1:]):
        return []
    return [("checkpoint.uri", f"{uri!r} has an empty part, '.' or '..'; expected {expected}")]


def _azure_faults(uri: str, endpoint: str | None, region: str | None) -> list[Fault]:
    faults: list[Fault] = []
    if not re.fullmatch(r"[a-z0-9](-?[a-z0-9]){2,62}", StoreUri.of(uri).container, re.ASCII):
        faults.append(("checkpoint.uri", f"{uri!r} names no container; expected az://container/prefix"))
    faults += _segment_faults(uri, "az://container/a/b")
    if re.search(r"\\|[^./]\.(/|$)", StoreUri.of(uri).prefix):
        about = "holds a backslash, or a part that ends in a dot: Azure changes such names; leave them out"
        faults.append(("checkpoint.uri", f"{uri!r} {about}"))
    if endpoint is None:
        faults.append(("checkpoint.endpoint", f"is required with az://: the account, {_AZURE_ENDPOINT}"))
    elif not _is_account(endpoint):
        shown = endpoint.partition("?")[0]  # the query may hold a signature
        message = f"{shown!r} is no account; expected {_AZURE_ENDPOINT}, or http(s)://host[:port]/<account>"
        faults.append(("checkpoint.endpoint", message))
    if region is not None:
        faults.append(("checkpoint.region", "has a meaning with an s3:// uri only; leave it out"))
    return faults


def _is_account(url: str) -> bool:
    """Whether the host names the account, as Azure's own do, or else the path does."""
    if not _is_endpoint(url):
        return False
    parts = urlsplit(url)
    named = re.fullmatch(r"[a-z0-9]{3,24}", parts.path.strip("/")) is not None
    plain = not parts.query and not parts.fragment and not parts.username
    return plain and (not parts.path.strip("/") if is_azure(url) else named)


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unfinished bracket, a port that is none
        return False


# ---- what is allowed ---------------------------------------------------------------------------------------


def entry_faults(allowed: Sequence[str]) -> list[str]:
    """Faults of entries of `ServerConfig.allow_stores`."""
    expected = "s3://[bucket[/prefix]], az://, http(s)://host[:port][/bucket[/prefix]] or file:///folder"
    return [f"{entry!r} is no store; expected {expected}" for entry in allowed if not _is_entry(entry)]


def _is_entry(entry: str) -> bool:
    try:
        parts = urlsplit(entry)
        _ = parts.port
    except ValueError:  # an unfinished bracket, a port that is none
        return False
    address = StoreUri.of(entry)
    if address.scheme != parts.scheme or "@" in address.container:
        return False
    match address.scheme:
        case "s3":
            return _is_bucket(address.container) or entry == AWS
        case "az":
            return entry == AZURE
        case "file":
            return not address.container and address.path.startswith("/")
        case _:
            return address.scheme in _PORTS and bool(parts.hostname) and not re.search(r"[?#]", entry)


def covers(entry: str, uri: str, endpoint: str | None) -> bool:
    """Whether an entry of `ServerConfig.allow_stores` allows the store of a job."""
    given, wanted = StoreUri.of(entry), StoreUri.of(uri)
    folder, inside = given.folder, wanted.folder
    if folder is not None or inside is not None:
        if folder is None or inside is None:
            return False
        return inside.resolve().is_relative_to(folder.resolve())
    path = f"{wanted.container}{wanted.path}"  # bucket/prefix
    if wanted.scheme == "az":
        return _covers_azure(entry, path, endpoint)
    if given.scheme == "s3":
        return _is_aws(endpoint) and _below(path, f"{given.container}{given.path}")
    if endpoint is None or given.scheme == "az":
        return False
    return _address(endpoint) == _address(entry) and _below(path, given.path.lstrip("/"))


def _covers_azure(entry: str, path: str, endpoint: str | None) -> bool:
    """Whether the entry covers an account; only Azure's own hosts, since others could reuse a token."""
    if endpoint is None or not is_azure(endpoint):
        return False
    if entry == AZURE:
        return True
    return _address(endpoint) == _address(entry) and _below(path, urlsplit(entry).path.lstrip("/"))


def _below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or continues it after a slash; no prefix is everything."""
    prefix = prefix.strip("/")
    return not prefix or f"{path.strip('/')}/".startswith(f"{prefix}/")


def _is_aws(endpoint: str | None) -> bool:
    """AWS's own S3. Other hosts below amazonaws.com are its customers'."""
    if endpoint is None:
        return True
    scheme, host, port = _address(endpoint)
    return scheme == "https" and port == _PORTS["https"] and _AWS_HOST.fullmatch(host) is not None


def _address(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme, 0)
