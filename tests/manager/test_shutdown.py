"""A manager that is told to end does so, whatever its connections are doing."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

from makara.manager.authority import Authority, names_of
from makara.manager.connections import Connections
from makara.manager.http_server import Server

_UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: bWFrYXJhIGlzIGEgZmlzaA==\r\n\r\n"
)
_CLOSE = b"\x88\x80\0\0\0\0"  # of a client, masked, with no reason


async def _accepting(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass


def _close_and_stay(address: tuple[str, int], authority: Authority) -> ssl.SSLSocket:
    """A peer that has said that it closes, was answered, and does not go."""
    trust = ssl.create_default_context(cadata=authority.certificate)
    peer = trust.wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1")
    peer.sendall(_UPGRADE)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += peer.recv(4096)
    assert b" 101 " in answer
    peer.sendall(_CLOSE)
    assert peer.recv(2) == b"\x88\x00"
    return peer


def test_a_manager_ends_while_a_peer_is_closing(tmp_path: Path) -> None:
    authority = Authority(tmp_path, names_of("127.0.0.1"))

    async def play(listener: socket.socket) -> None:
        server = Server(_accepting, Connections(1024), lifespan="off", ssl_context_factory=authority.offered)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        peer = await asyncio.to_thread(_close_and_stay, listener.getsockname(), authority)
        with peer:
            assert server.server_state.connections, "its end of the connection is still open"
            server.should_exit = True
            await serving

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(play(listener))
