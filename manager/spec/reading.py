"""Reads and writes files of a command; errors name file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...simulator.source_lines import decode
from ...simulator.validation import FileFault

T = TypeVar("T")


class BadFile(ValueError):
    """An unusable file. The message begins with the file, and the line if there is one."""


def read_file(path: Path, parse: Callable[[str], T]) -> T:
    """Read and parse a file. Raises `BadFile`."""
    try:
        return parse(decode(path.read_bytes(), FileFault))
    except OSError as error:
        raise BadFile(f"{path}: cannot read it: {error.strerror}") from error
    except FileFault as error:
        raise BadFile(error.in_file(path)) from error


def write_file(path: Path, text: str) -> None:
    """Write a file. Raises `BadFile`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{path}: cannot write it: {error.strerror}") from error
