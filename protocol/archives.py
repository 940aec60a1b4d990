"""A job's code as an archive, with bounds that are checked before anything is unpacked.

A small archive can unpack to any size, and its headers can have `tarfile` use any memory and time. So the
number of members, their total size, and what `tarfile` reads for each are checked as the stream is read.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import struct
import sys
import tarfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

_LONGEST_HEADER = 64 * 1024
_HEADERS_BYTES = 4096  # of one member, with what is added to it, on average
_MOST_HEADERS_BYTES = 2 * _LONGEST_HEADER  # of one member
_MOST_GLOBAL = 100  # records that hold for all members; git writes one
_LONGEST_NUMBER = 100  # digits; `tarfile` of Python 3.11 takes time in the square of it
_RECORD = re.compile(rb"(\d{1,5}) [^=\n]+=")  # of a pax header: its length, and its keyword
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
            stream = _Headers(files.enter_context(gzip.open(io.BytesIO(data))))
            with _parsing(stream):  # of the first header
                archive = files.enter_context(tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:"))
            yield archive
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise BadArchive(f"not a tar.gz archive: {error}") from error


@contextmanager
def _parsing(stream: _Headers) -> Generator[None]:
    """Raises `BadArchive` where `tarfile`, which raises almost anything, cannot read a header."""
    try:
        with stream.parsed():
            yield
    except (ValueError, LookupError, ArithmeticError, TypeError, struct.error, RecursionError) as error:
        if isinstance(error, BadArchive):
            raise
        raise BadArchive(f"not a tar.gz archive: a header of it is malformed ({error})") from error


def members(archive: tarfile.TarFile, bounds: BundleBounds) -> Iterator[tarfile.TarInfo]:
    """Yield the members. Raises `BadArchive` at the first that is not a plain file or folder inside the
    bundle, or exceeds the bounds.
    """
    total = 0
    for number in itertools.count(1):
        with _parsing(cast(_Headers, archive.fileobj)):
            member = archive.next()
        if member is None:
            return
        cast(Any, archive).members.clear()  # else it keeps each with all that its headers say
        if len(archive.pax_headers) > _MOST_GLOBAL:
            raise BadArchive(f"has {len(archive.pax_headers)} records for all members, not {_MOST_GLOBAL}")
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


def _check_records(data: bytes) -> None:
    """Raises `BadArchive` unless pax records follow each other: where they overlap, `tarfile` keeps a keyword
    of almost the whole header for each two bytes."""
    place = 0
    while found := _RECORD.match(data, place):
        end = place + int(found[1])
        if not found.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            break
        place = end
    if data[place:].strip(b"\0"):
        raise BadArchive("not a tar.gz archive: a pax header of it is malformed")
    if max(map(len, re.findall(rb"\d+", data)), default=0) > _LONGEST_NUMBER:
        raise BadArchive(f"a header has more than {_LONGEST_NUMBER} digits in a row")


class _Headers:
    """Limits what `tarfile` reads of an archive, at once and for the headers of a member.

    tarfile reads a header's extensions into memory at any length that the archive states, and the map of a
    sparse file until its end.
    """

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = _MOST_HEADERS_BYTES  # that headers may have now
        self._parsed = False
        self._is_extension = False  # what is read next is the body of a pax header

    @contextmanager
    def parsed(self) -> Generator[None]:
        """Inside, headers are read: at most 128 KiB for one member, and 4 KiB on average."""
        self._parsed, self._is_extension = True, False
        try:
            yield
        finally:
            self._parsed = False
            self._left = min(_MOST_HEADERS_BYTES, self._left + _HEADERS_BYTES)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise BadArchive(f"a header of {size} bytes; expected at most {_LONGEST_HEADER}")
        data = self._stream.read(size)
        if self._parsed:
            self._left -= size
            if self._left < 0:
                raise BadArchive(f"headers of more than {_MOST_HEADERS_BYTES} bytes before a file or folder")
            if self._is_extension:
                _check_records(data)
            self._is_extension = not self._is_extension and data[156:157] in (b"x", b"g", b"X")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset < self._stream.tell():  # which would decompress all of it once more
            raise BadArchive("not a tar.gz archive: a size in it is negative")
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
