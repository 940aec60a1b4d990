"""Reads the ends of a VM's log files."""

from __future__ import annotations

import os
from pathlib import Path

BEFORE = ".1"  # the suffix of a log's older part


def tail(path: Path, most_bytes: int) -> str:
    """The last `most_bytes` of a log and its older part; "" if there is none."""
    data = _end(path, most_bytes)
    if len(data) < most_bytes:
        data = _end(path.with_name(path.name + BEFORE), most_bytes - len(data)) + data
    return data.decode(errors="replace")


def _end(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes)
    except FileNotFoundError:
        return b""
