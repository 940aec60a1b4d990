"""Where a job file says that checkpoints go: what can be told about it without asking the store."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

Fault = tuple[str, str]


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
