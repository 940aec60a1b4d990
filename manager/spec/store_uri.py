"""Where a job file says that checkpoints go, and where an administrator says that they may: what can be told
without asking the store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

Fault = tuple[str, str]

AWS = "s3://"  # any bucket there
EVERY_FOLDER = "file:///"
_AWS_HOST = re.compile(r"s3([.-](dualstack\.)?[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
_PORTS = {"http": 80, "https": 443}


def is_absolute(uri: str) -> bool:
    """Whether `uri` means the same in every folder."""
    return uri.startswith(("file:///", "s3://"))


def uri_faults(uri: str, endpoint: str | None, region: str | None) -> list[Fault]:
    """(field, message) of what is wrong with the three fields of a job file's `checkpoint`."""
    if "\0" in unquote(uri):
        return [("checkpoint.uri", f"{uri!r} holds a NUL character, which no name can")]
    scheme = uri.split("://", 1)[0] if "://" in uri else None
    if scheme == "s3":
        return _s3_faults(uri, endpoint, region)
    if scheme not in (None, "file"):
        expected = "expected a path, file:///path or s3://bucket/prefix"
        return [("checkpoint.uri", f"{uri!r} has scheme {scheme!r}; {expected}")]
    if scheme == "file" and not uri.startswith("file:///"):
        return [("checkpoint.uri", f"{uri!r} names a host; expected file:///absolute/path")]
    given = {"endpoint": endpoint, "region": region}
    message = "has a meaning with an s3:// uri only; leave it out"
    return [(f"checkpoint.{name}", message) for name, value in given.items() if value is not None]


def _s3_faults(uri: str, endpoint: str | None, region: str | None) -> list[Fault]:
    faults: list[Fault] = []
    if not re.match(r"s3://[\w.-]+(/|$)", uri, re.ASCII):
        faults.append(("checkpoint.uri", f"{uri!r} names no bucket; expected s3://bucket/prefix"))
    segments = uri.removeprefix("s3://").rstrip("/").split("/")
    if any(segment in ("", ".", "..") for segment in segments[1:]):
        faults.append(("checkpoint.uri", f"{uri!r} has an empty part, '.' or '..'; expected s3://bucket/a/b"))
    if endpoint is not None and not _is_endpoint(endpoint):
        message = f"{endpoint!r} is no address; expected http(s)://host[:port]"
        faults.append(("checkpoint.endpoint", message))
    if region is not None and not re.fullmatch(r"[a-z0-9-]{1,63}", region):
        message = f"{region!r} is no region; expected a name such as eu-central-1"
        faults.append(("checkpoint.region", message))
    return faults


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unfinished bracket, a port that is none
        return False


# ---- what is allowed ---------------------------------------------------------------------------------------


def entry_faults(allowed: Sequence[str]) -> list[str]:
    """What is wrong with entries of `ServerConfig.allow_stores`."""
    expected = "s3://[bucket[/prefix]], http(s)://host[:port][/bucket[/prefix]] or file:///folder"
    return [f"{entry!r} is no store; expected {expected}" for entry in allowed if not _is_entry(entry)]


def _is_entry(entry: str) -> bool:
    try:
        parts = urlsplit(entry)
        _ = parts.port
    except ValueError:  # an unfinished bracket, a port that is none
        return False
    if not entry.startswith(f"{parts.scheme}://") or parts.query or parts.username:
        return False
    match parts.scheme:
        case "s3":
            return bool(parts.netloc) or not parts.path
        case "file":
            return not parts.netloc and parts.path.startswith("/")
        case _:
            return parts.scheme in _PORTS and bool(parts.hostname)


def covers(entry: str, uri: str, endpoint: str | None) -> bool:
    """Whether an entry of `ServerConfig.allow_stores` allows the store of a job."""
    given, wanted = urlsplit(entry), urlsplit(uri)
    if given.scheme == "file" or wanted.scheme == "file":
        if given.scheme != wanted.scheme:
            return False
        folder, inside = Path(unquote(given.path)), Path(unquote(wanted.path))
        return inside.resolve().is_relative_to(folder.resolve())
    path = f"{wanted.netloc}{wanted.path}"  # bucket/prefix
    if given.scheme == "s3":
        return _is_aws(endpoint) and _below(path, f"{given.netloc}{given.path}")
    if endpoint is None:
        return False
    return _address(endpoint) == _address(entry) and _below(path, given.path.lstrip("/"))


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
