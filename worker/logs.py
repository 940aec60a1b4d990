"""Log files of a VM: bounded, and read from their ends."""

from __future__ import annotations

import os
from pathlib import Path

BEFORE = ".1"  # the suffix of what was written before


def tail(path: Path, most_bytes: int) -> str:
    """The end of a log, with that of what was moved away before it; "" if there is none."""
    data = _end(path, most_bytes)
    if len(data) < most_bytes:
        data = _end(path.with_name(path.name + BEFORE), most_bytes - len(data)) + data
    return data.decode(errors="replace")


def bound(path: Path, kept_bytes: int) -> None:
    """If the log is longer, move its end away and empty it.

    Its writers go on undisturbed: they append to the same file (which they opened so). What they write
    in this very moment may be lost.
    """
    try:
        with path.open("r+b") as log:
            size = os.fstat(log.fileno()).st_size
            if size <= kept_bytes:
                return
            log.seek(size - kept_bytes)
            path.with_name(path.name + BEFORE).write_bytes(log.read(kept_bytes))
            log.truncate(0)
    except FileNotFoundError:
        return  # nothing was written yet


def _end(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes)
    except FileNotFoundError:
        return b""
