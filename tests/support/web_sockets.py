"""Connections to a manager as its agents open them."""

from __future__ import annotations

from collections.abc import Mapping
from ssl import SSLContext

from websockets.sync.client import ClientConnection, connect


def web_socket(
    manager: str, path: str, headers: Mapping[str, str], trust: SSLContext | None = None
) -> ClientConnection:
    """`manager`: its URL. Waits for as long as the manager needs: on a busy machine ten seconds were once too
    few, and then the library waited for its own thread for ever."""
    url = manager.replace("http", "ws", 1) + path
    return connect(url, ssl=trust, additional_headers=headers, proxy=None, open_timeout=None)
