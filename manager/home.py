"""Where commands find a manager: its home and address, and defaults.

It imports no other module of ours, so that commands start fast.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

DEFAULT_PORT = 8700
CA_FILE = "ca.pem"  # in the home: the certificate by which clients trust this manager
DEFAULT_BUNDLE_BYTES = 64 << 20


class ConfigError(ValueError):
    """An invalid setting; the message names it and says what would be accepted."""


def default_home() -> Path:
    """`$MAKARA_HOME`, else `~/.makara`."""
    return Path(os.environ.get("MAKARA_HOME") or Path.home() / ".makara").expanduser().resolve()


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
