"""Whom a VM trusts to be its manager."""

from __future__ import annotations

import ipaddress
import ssl
from urllib.parse import urlsplit

from ...protocol.messages import BootConfig


class NotTrusted(ValueError):
    """The boot file names a manager to whom no secret may be shown."""


def trust(boot: BootConfig) -> ssl.SSLContext:
    """The authority of the boot file and no other; without one, those of the system.

    Raises `NotTrusted` if it is no certificate.
    """
    try:
        return ssl.create_default_context(cadata=boot.ca)
    except (ssl.SSLError, ValueError) as error:
        raise NotTrusted(f"ca: expected certificates as PEM: {error}") from error


def check_address(url: str) -> None:
    """Raises `NotTrusted` for plain HTTP beyond loopback: everybody on the way could read what is sent."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise NotTrusted(f"manager_url: {url} is plain HTTP beyond loopback; expected https://...")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
