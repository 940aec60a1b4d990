"""Connections to a manager as its agents open them."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext, TLSVersion

from websockets.sync.client import ClientConnection, connect


def web_socket(
    manager: str, path: str, headers: Mapping[str, str], trust: SSLContext | None = None
) -> ClientConnection:
    """`manager`: its URL. Waits for as long as the manager needs.

    TLS 1.2, as the client reads and writes in two threads, and OpenSSL may lose what is written while it
    reads a ticket of TLS 1.3: of 10,000 requests on busy cores 26 never left, and both ends waited.
    """
    if trust is not None:
        trust.maximum_version = TLSVersion.TLSv1_2
    url = manager.replace("http", "ws", 1) + path
    return connect(url, ssl=trust, additional_headers=headers, proxy=None, open_timeout=None)
