"""Splits the URI of a store. Everything that reads such a URI uses this, so that all open the same place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class StoreUri:
    """`scheme://container/path`. For `file` the container is the host, usually empty.

    Everything after the container is the path: a name in a store may contain `#` and `?`, so they begin no
    fragment and no query here. S3 and Azure keep percent signs as they are, and only a folder's URI is
    percent-decoded (`folder`).
    """

    scheme: str
    container: str
    path: str

    @classmethod
    def of(cls, uri: str) -> StoreUri:
        """Split `uri`. A text without `://` has an empty scheme and is all path."""
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return cls("", "", uri)
        container, slash, path = rest.partition("/")
        return cls(scheme, container, slash + path)

    @property
    def prefix(self) -> str:
        """The path without slashes at its ends."""
        return self.path.strip("/")

    @property
    def folder(self) -> Path | None:
        """The folder that a `file` URI names; None for other stores."""
        return Path(unquote(self.path)) if self.scheme == "file" else None
