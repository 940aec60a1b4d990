"""uvicorn's server with connections that `Connections` accepts (checked with uvicorn 0.54)."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from .connections import Connection, Connections

_KEEP_ALIVE_S = 60  # longer than httpx's 5 s, so that the client closes an idle connection, not both at once
_PING_S = 60.0  # agents send anyway; pings only detect connections of VMs that are gone


class HttpSocket(H11Protocol):
    """uvicorn's, which says when its connection has closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _has_closed(self.app_state)


class AgentSocket(WebSocketsSansIOProtocol):
    """A workaround: uvicorn's (0.54) fails on shutdown if a peer has begun to close (likely over TLS)."""

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Break a reference cycle of the websockets (17) parser and its connection, which would keep the
        memory of its compression until the collector runs, which is rare."""
        super().connection_lost(exc)
        self.conn.parser.close()
        _has_closed(self.app_state)


class Server(uvicorn.Server):
    """Serves `app` on the connections that `connections` accepts from the listener given to `serve`."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        """`settings`: others of uvicorn's `Config`."""
        config = uvicorn.Config(
            app,
            http=HttpSocket,
            ws=AgentSocket,
            log_config=None,  # as all others of this process
            log_level="warning",
            access_log=False,
            ws_ping_interval=_PING_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            **settings,
        )
        super().__init__(config)
        self._accepted_by = connections
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept."""
        assert sockets is not None, "uvicorn would make its own"
        [listener] = sockets
        await super().startup(sockets=[])  # uvicorn itself would accept without bounds
        accept = self._accepted_by.accept(listener, self._serve_connection)
        self._accepting = asyncio.create_task(accept)
        self._accepting.add_done_callback(self._end)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end as uvicorn does. Raises what ended the accepting."""
        accepting = self._accepting
        if accepting is not None:
            accepting.cancel()
            await asyncio.wait([accepting])
        await super().shutdown(sockets)
        if accepting is not None and not accepting.cancelled():
            accepting.result()

    async def _serve_connection(self, connection: Connection, accepted: socket.socket) -> None:
        """Hand a connection to uvicorn's protocol, after its TLS handshake."""

        def protocol() -> HttpSocket:
            state = {**self.lifespan.state, "connection": connection}
            return HttpSocket(self.config, self.server_state, state)

        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(protocol, accepted, ssl=self.config.ssl)

    def _end(self, _: asyncio.Task[None]) -> None:
        self.should_exit = True


def connection_of(scope: Any) -> Connection | None:
    """The connection of a request; None if it came another way, as in tests."""
    return cast("Connection | None", scope.get("state", {}).get("connection"))


def _has_closed(state: dict[str, Any]) -> None:
    connection = state.get("connection")
    if connection is not None:
        connection.closed()
