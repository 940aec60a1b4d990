"""Formatting of hashes."""

from __future__ import annotations


def short(hash_: str) -> str:
    """The beginning of a hash, for people."""
    return hash_[:12]
