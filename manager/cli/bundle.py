"""Packs a job's folder into an archive; equal files give equal bytes."""

from __future__ import annotations

import fnmatch
import gzip
import heapq
import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...protocol.archives import DEFAULT, BundleBounds
from ...protocol.sizes import in_words

EXCLUDED = (
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", ".DS_Store",
    ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".idea", ".vscode", "*.egg-info",
)  # fmt: skip
IGNORE_FILE = ".makaraignore"
_MOST_NAMED = 3  # files


class BundleError(ValueError):
    """A folder that cannot be sent; the message names it and what would be accepted."""


def pack(
    folder: Path,
    *,
    max_bytes: int,
    also_exclude: tuple[Path, ...] = (),
    bounds: BundleBounds = DEFAULT,
) -> bytes:
    """The files below `folder` as a tar.gz, without excluded ones (`EXCLUDED`, `.makaraignore`).

    `also_exclude`: folders left out, such as the one for checkpoints. Raises `BundleError`.
    """
    if not folder.is_dir():
        raise BundleError(f"workdir: {folder} is no folder")
    raw, total = io.BytesIO(), 0
    sizes: dict[Path, int] = {}
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        left_out = {p.resolve() for p in also_exclude}
        paths = _paths(folder, folder, _patterns(folder), left_out)
        for number, path in enumerate((path for path in paths if path.is_file()), 1):
            sizes[path] = path.stat().st_size
            total += sizes[path]
            if number > bounds.members:
                raise _too_much(folder, f"holds more than {bounds.members} files", sizes)
            if total > bounds.unpacked_bytes:
                raise _too_much(folder, f"holds more than {in_words(bounds.unpacked_bytes)}", sizes)
            _add(archive, path, path.relative_to(folder).as_posix())
    data = gzip.compress(raw.getvalue(), mtime=0)
    if len(data) > max_bytes:
        what = f"is {in_words(len(data))} when packed, and the manager takes {in_words(max_bytes)}"
        raise _too_much(folder, what, sizes)
    return data


def linked_folders(folder: Path, also_exclude: tuple[Path, ...] = ()) -> list[str]:
    """The links to folders below `folder` that `pack` leaves out, though no pattern names them."""
    left_out = {path.resolve() for path in also_exclude}
    paths = _paths(folder, folder, _patterns(folder), left_out)
    return [path.relative_to(folder).as_posix() for path in paths if path.is_dir()]


def _too_much(folder: Path, what: str, sizes: Mapping[Path, int]) -> BundleError:
    largest = heapq.nlargest(_MOST_NAMED, sizes, key=sizes.__getitem__)
    named = ", ".join(f"{path.relative_to(folder)} {in_words(sizes[path])}" for path in largest)
    remedy = (
        f"name what the job does not need in {folder / IGNORE_FILE}, one pattern a line; data is better read "
        "from where all VMs reach it (docs/job-file.md, Data); `makara server --max-bundle SIZE` takes more"
    )
    return BundleError(f"workdir: {folder} {what} (largest: {named}); {remedy}")


def _paths(folder: Path, root: Path, patterns: tuple[str, ...], left_out: set[Path]) -> Iterator[Path]:
    """Files, and links to files and folders, which are not followed."""
    for path in sorted(folder.iterdir()):
        relative = path.relative_to(root).as_posix()
        if path.resolve() in left_out or any(_matches(path.name, relative, p) for p in patterns):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _paths(path, root, patterns, left_out)
        elif path.is_file() or path.is_dir():
            yield path  # a link to a file is sent as the file


def _matches(name: str, relative: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    if "/" in pattern:
        return fnmatch.fnmatchcase(relative, pattern.lstrip("/"))
    return fnmatch.fnmatchcase(name, pattern)


def _patterns(folder: Path) -> tuple[str, ...]:
    path = folder / IGNORE_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    own = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return (*EXCLUDED, *own)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    data = path.read_bytes()
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    archive.addfile(entry, io.BytesIO(data))  # owner, group and time stay zero
