"""Which manager a VM trusts."""

from __future__ import annotations

import ipaddress
import ssl
from urllib.parse import urlsplit

from ...protocol.messages import BootConfig


class NotTrusted(ValueError):
    """The boot file names a manager to which secrets must not be sent."""


def trust(boot: BootConfig) -> ssl.SSLContext:
    """A TLS context that trusts only the boot file's authority; without one, the system's authorities.

    Raises `NotTrusted` if it is not a certificate.
    """
    try:
        return ssl.create_default_context(cadata=boot.ca)
    except (ssl.SSLError, ValueError) as error:
        raise NotTrusted(f"ca: expected certificates as PEM: {error}") from error


def check_address(url: str) -> None:
    """Raise `NotTrusted` for plain HTTP beyond loopback, where others could read what is sent."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise NotTrusted(f"manager_url: {url} is plain HTTP beyond loopback; expected https://...")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
