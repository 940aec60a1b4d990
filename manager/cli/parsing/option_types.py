"""Types of options: each parses a text, and raises `argparse.ArgumentTypeError`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...spec.paths import expanded


def path(text: str) -> Path:
    """A path, which may begin with `~`: shells leave `--option=~/x` as it is."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def size(text: str) -> int:
    """Bytes, such as 16GiB."""
    from ...spec.fields import size_of  # here, because it imports pydantic

    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
