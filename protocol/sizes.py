"""Sizes in words."""

from __future__ import annotations


def in_words(size_bytes: float) -> str:
    """A size for people, in four digits and binary units: `64 MiB`."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size_bytes >= 1024 and len(units) > 1:
        size_bytes /= 1024
        units.pop(0)
    return f"{size_bytes:.4g} {units[0]}"
