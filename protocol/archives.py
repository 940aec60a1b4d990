"""A job's code as an archive, with bounds that are checked before anything is unpacked.

A small archive can unpack to any size. So the number of members, their total size, and the memory of their
headers are checked as the stream is read.
"""

from __future__ import annotations

import gzip
import io
import itertools
import struct
import sys
import tarfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, cast

_LONGEST_HEADER = 64 * 1024
_HEADERS_BYTES = 4096  # of one member, with what is added to it
_LONGEST_PART = 255  # bytes of one part of a path, as file systems allow


class BadArchive(ValueError):
    """Not an archive, or one that exceeds its bounds; the message says which."""


@dataclass(frozen=True, slots=True)
class BundleBounds:
    """Limits of an unpacked bundle."""

    members: int = 20_000  # files and folders
    unpacked_bytes: int = 1 << 30
    name_chars: int = 1_000  # of one path inside the bundle

    @property
    def stream_bytes(self) -> int:
        """The limit of the uncompressed archive, including headers between the files."""
        return self.unpacked_bytes + _HEADERS_BYTES * self.members + _LONGEST_HEADER


DEFAULT = BundleBounds()
# For VMs: the manager has checked the bundle already, perhaps with other bounds.
ANY_SIZE = BundleBounds(members=sys.maxsize, unpacked_bytes=sys.maxsize, name_chars=sys.maxsize)


@contextmanager
def opened(data: bytes) -> Generator[tarfile.TarFile]:
    """Open the tar.gz `data`, to be read once from beginning to end. Raises `BadArchive`, also inside the
    context; errors of unpacked files stay `OSError`s."""
    try:
        with ExitStack() as files:
            stream = cast(IO[bytes], _Headers(files.enter_context(gzip.open(io.BytesIO(data)))))
            with _parsing():  # of the first header
                archive = files.enter_context(tarfile.open(fileobj=stream, mode="r:"))
            yield archive
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise BadArchive(f"not a tar.gz archive: {error}") from error


@contextmanager
def _parsing() -> Generator[None]:
    """Raises `BadArchive` where `tarfile`, which raises almost anything, cannot read a header."""
    try:
        yield
    except (ValueError, LookupError, ArithmeticError, TypeError, struct.error, RecursionError) as error:
        if isinstance(error, BadArchive):
            raise
        raise BadArchive(f"not a tar.gz archive: a header of it is malformed ({error})") from error


def members(archive: tarfile.TarFile, bounds: BundleBounds) -> Iterator[tarfile.TarInfo]:
    """Yield the members. Raises `BadArchive` at the first that is not a plain file or folder inside the
    bundle, or exceeds the bounds.
    """
    total, headers = 0, iter(archive)
    for number in itertools.count(1):
        with _parsing():
            member = next(headers, None)
        if member is None:
            return
        if number > bounds.members:
            raise BadArchive(f"holds more than {bounds.members} files and folders")
        _check_name(member.name, bounds)
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise BadArchive(f"{member.name!r} is no plain file inside the bundle")
        if member.size < 0:
            raise BadArchive(f"{member.name!r} has a size of {member.size} bytes")
        total += member.size
        if total > bounds.unpacked_bytes:
            raise BadArchive(f"unpacks to more than {bounds.unpacked_bytes} bytes")
        yield member


def check(data: bytes, bounds: BundleBounds) -> None:
    """Read the whole archive without unpacking it. Raises `BadArchive`."""
    with opened(data) as archive:
        for _ in members(archive, bounds):
            pass
        stream = cast(_Headers, archive.fileobj)
        while stream.read(_LONGEST_HEADER):  # to the end, where gzip's own checksum is
            if stream.tell() > bounds.stream_bytes:
                raise BadArchive(f"unpacks to more than {bounds.unpacked_bytes} bytes")


def _check_name(name: str, bounds: BundleBounds) -> None:
    if len(name) > bounds.name_chars:
        raise BadArchive(f"{name[:80]!r}... is a name of {len(name)} characters, not {bounds.name_chars}")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise BadArchive(f"{name!r} is no plain file inside the bundle")
    if any(len(part.encode(errors="replace")) > _LONGEST_PART for part in parts):
        raise BadArchive(f"{name[:80]!r}... has a part of more than {_LONGEST_PART} bytes")


class _Headers:
    """Limits what `tarfile` reads at once of an archive whose members are skipped: only headers.

    tarfile reads a header's extensions into memory at any length that the archive states.
    """

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise BadArchive(f"a header of {size} bytes; expected at most {_LONGEST_HEADER}")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
