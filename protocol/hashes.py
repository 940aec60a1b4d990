"""How hashes are shown."""

from __future__ import annotations


def short(hash_: str) -> str:
    """So much of a hash that a person can tell it from others."""
    return hash_[:12]
