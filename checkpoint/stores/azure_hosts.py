"""Tells which addresses are Azure Blob Storage itself, without importing its client."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

# An account's own host, also one in a DNS zone (storage-account-overview, standard and DNS zone endpoints).
_HOST = re.compile(r"[a-z0-9]{3,24}\.(blob\.core\.windows\.net|z\d{1,2}\.blob\.storage\.azure\.net)")


def is_azure(endpoint: str) -> bool:
    """Whether `endpoint` is an account of Azure's public cloud, over TLS."""
    try:
        parts = urlsplit(endpoint)
        host = (parts.hostname or "").rstrip(".")
        return parts.scheme == "https" and parts.port in (None, 443) and _HOST.fullmatch(host) is not None
    except ValueError:  # an unfinished bracket, a port that is none
        return False
