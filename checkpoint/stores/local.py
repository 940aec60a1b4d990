"""A folder as a store: one file per object, renamed into place, and a lock file around each swap."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import Conflict, NotFound, StoreRefused, StoreUnavailable
from .advice import about_file
from .store import MOST_RECORD_BYTES, Store, StoredObject, Unfinished, check_key

# Errors that waiting does not resolve. All other failures of the file system count as transient.
_REFUSALS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EEXIST,  # a file where a folder is needed
}
_LOCK_PATIENCE_S = 20.0
_TEMPORARY = ".tmp-"


class LocalStore(Store):
    """Objects as files below `root`, which the first write creates."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self._uri = uri

    @property
    def uri(self) -> str:
        return self._uri

    def could_be_made(self) -> bool:
        """Whether there is no root yet but a write could create it; False if a write would report why not."""
        with suppress(OSError):
            found = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
            return found != self.root and found.is_dir() and os.access(found, os.W_OK | os.X_OK)
        return False

    def put(self, key: str, data: bytes) -> None:
        self._write(key, lambda file: file.write(data))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self._write(key, lambda file: shutil.copyfileobj(source, file, 1 << 20))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._translated(key), path.open("rb") as file:
            data = file.read(MOST_RECORD_BYTES + 1)
        if len(data) > MOST_RECORD_BYTES:
            raise StoreRefused(
                f"checkpoint.uri {self.uri}: {key}: is larger than {MOST_RECORD_BYTES} bytes, and no record"
            )
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with self._translated(key), path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._translated(key):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "a folder, not an object", str(path))
            return found.st_size

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        found = [
            StoredObject(key, stat.st_size, stat.st_mtime)
            for key, stat in self._files(prefix)
            if not key.rpartition("/")[2].startswith(".")
        ]
        return iter(sorted(found, key=lambda stored: stored.key))

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            with self._translated(key):
                path.unlink(missing_ok=True)
            folders.add(path.parent)
        for folder in sorted(folders):
            with self._translated(folder.as_posix()):
                self._leave(folder)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        found = [
            Unfinished(key, stat.st_mtime, key)
            for key, stat in self._files(prefix)
            if key.rpartition("/")[2].startswith(_TEMPORARY)
        ]
        return iter(sorted(found, key=lambda unfinished: unfinished.key))

    def abort(self, unfinished: Unfinished) -> None:
        path = self.root / unfinished.upload
        with self._translated(unfinished.key):
            path.unlink(missing_ok=True)
            self._leave(path.parent)

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.get(key)
        except NotFound:
            return None
        return data, _etag(data)

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        path = self._path(key)
        with self._locked(key, path.parent):
            current = self.read_tagged(key)
            found = None if current is None else current[1]
            if found != expected_etag:
                raise Conflict(f"{key} in {self.uri}: expected tag {expected_etag}, found {found}")
            self.put(key, data)
        return _etag(data)

    def _files(self, prefix: str) -> list[tuple[str, os.stat_result]]:
        """Files whose keys start with `prefix`, hidden ones too."""
        folder = prefix.rpartition("/")[0]
        top = self._path(folder) if folder else self.root
        found: list[tuple[str, os.stat_result]] = []
        with self._translated(prefix):
            for directory, _, names in os.walk(top, onerror=_unless_absent):
                for name in names:
                    path = Path(directory, name)
                    key = path.relative_to(self.root).as_posix()
                    if key.startswith(prefix):
                        with suppress(FileNotFoundError):  # deleted since it was listed
                            found.append((key, path.stat()))
        return found

    def _leave(self, folder: Path) -> None:
        """Make a deletion durable, and remove folders that it left empty."""
        if not folder.is_dir():
            return
        _sync_folder(folder)
        if folder != self.root:
            with suppress(OSError):  # not empty, perhaps because a writer has just put something there
                folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*check_key(key).split("/"))

    def _write(self, key: str, fill: Callable[[IO[bytes]], object]) -> None:
        """Write to a uniquely named temporary file, then rename it: two writers of a key share no file."""
        path = self._path(key)
        temporary = path.parent / f"{_TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        with self._translated(key, writing=True):
            _make_folder(path.parent)
            try:
                with temporary.open("xb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(path.parent)

    @contextmanager
    def _locked(self, key: str, folder: Path) -> Generator[None]:
        """Hold the lock file of `folder`. The kernel frees it when its holder dies, however it dies."""
        with self._translated(key, writing=True):
            _make_folder(folder)
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + _LOCK_PATIENCE_S
            # Polled, because flock has no time-out and a stopped holder must not block all others.
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"{key} in {self.uri}: locked by another process for {_LOCK_PATIENCE_S} s"
                    )
                time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _translated(self, key: str, *, writing: bool = False) -> Generator[None]:
        try:
            yield
        except IsADirectoryError as error:
            kind = StoreRefused if writing else NotFound
            raise kind(f"checkpoint.uri {self.uri}: {key}: is a folder") from error
        except FileNotFoundError as error:
            if writing:  # a folder vanished between being made and being used
                raise StoreUnavailable(f"{key} in {self.uri}: {error}") from error
            raise NotFound(f"{key} in {self.uri}: no such object") from error
        except OSError as error:
            kind = StoreRefused if error.errno in _REFUSALS else StoreUnavailable
            raise kind(f"checkpoint.uri {self.uri}: {key}: {error}{about_file(error)}") from error


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    """`folder` and its parents, durably: a new folder is an entry that its parent must keep."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        if folder.parent.stat().st_mode & 0o222:  # or it is gone: then somebody deletes while we write
            raise
        # procfs reports "not found" where nothing can be created.
        raise PermissionError(errno.EPERM, "no folder can be made here", str(folder)) from error
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
