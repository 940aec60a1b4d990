"""Accepts the manager's connections, and bounds how many each peer holds and for how long.

A connection is unknown until a request on it showed a valid token: while its TLS handshake, its headers or
its body are on their way. Unknown ones are few and end soon, so that a peer without a token cannot use up the
files of this process, which agents and the journal need. They are counted by connection, not by address,
since many agents may share an address.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

log = logging.getLogger("makara.manager")

_UNKNOWN_S = 20.0  # from its arrival until a token must have been checked; 60 KiB at 30 kbit/s take 16 s
_UNDISTURBED_S = 2.0  # younger ones do not end for others: a thousand agents may come back at once
_MOST_UNKNOWN = 512  # with TLS each takes 300 KiB of memory
_MOST_FILES = 1 << 20  # containers may allow a thousand times this, which no manager needs
_RESERVED_FILES = 64  # for the journal, code bundles and stores, and what the process itself has open
_MOST_OF_A_USER = 256
MOST_OF_A_VM = 8  # its agent has one, and fetches code and secrets over others
_PAUSE_S = 1.0  # after a failure to accept
_WAIT_S = 0.05


class Connection:
    """An accepted connection. Its requests find it as `connection` in the state of their scope."""

    def __init__(self, connections: Connections, accepted: socket.socket, since: float) -> None:
        self.since = since  # of the event loop's clock
        self.owner: str | None = None  # None: unknown
        self._connections = connections
        self._socket = accepted

    def admit(self, owner: str, *, of_vm: bool = False) -> None:
        """Note that a request on it showed a valid token of `owner`, a user or a VM."""
        self._connections.admit(self, owner, MOST_OF_A_VM if of_vm else self._connections.most_of_a_user)

    def closed(self) -> None:
        """Note that it has closed. May be called again."""
        self._connections.forget(self)

    def end(self) -> None:
        """End it, whatever it is at; its transport notices that, and frees it."""
        self._connections.forget(self)
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)


_ServeConnection = Callable[[Connection, socket.socket], Awaitable[object]]


class Connections:
    """All connections of one manager. Runs on the event loop."""

    def __init__(
        self,
        most_files: int,
        *,
        most_unknown: int = _MOST_UNKNOWN,
        unknown_s: float = _UNKNOWN_S,
        undisturbed_s: float = _UNDISTURBED_S,
    ) -> None:
        """`most_files`: how many files this process may have open; unknown peers get a quarter at most."""
        self._most_files = most_files
        self._most_unknown = min(most_unknown, most_files // 4)
        self._unknown_s = unknown_s
        self._undisturbed_s = undisturbed_s
        self.most_of_a_user = min(_MOST_OF_A_USER, most_files // 16)
        self._unknown: dict[Connection, asyncio.TimerHandle] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  # of handshakes
        self._of_owner: dict[str, dict[Connection, None]] = {}  # the one that asked last is last

    async def accept(self, listener: socket.socket, serve: _ServeConnection) -> None:
        """Accept connections and `serve` each in a task of its own, until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            await self._wait_for_room(loop)
            try:
                accepted, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue  # the peer has gone
            except OSError as error:
                log.warning("no connection can be accepted for %g s: %s", _PAUSE_S, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._take(accepted, serve)
            await asyncio.sleep(0)  # connections that are there already go on

    def _take(self, accepted: socket.socket, serve: _ServeConnection) -> None:
        # The kernel gives the lowest free number, so that this one says how many files are open.
        if accepted.fileno() >= self._most_files - _RESERVED_FILES:
            log.warning(
                "a connection was closed: %d files are open; allow the manager more than %d (ulimit -n)",
                accepted.fileno(),
                self._most_files,
            )
            accepted.close()
            return
        loop = asyncio.get_running_loop()
        connection = Connection(self, accepted, loop.time())
        self._unknown[connection] = loop.call_later(self._unknown_s, connection.end)
        task = asyncio.create_task(_serve(connection, accepted, serve))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def admit(self, connection: Connection, owner: str, most: int) -> None:
        """Note whose the connection is. Of more than `most`, that with the oldest request ends."""
        if connection.owner is None and connection not in self._unknown:
            return  # it has been ended
        self.forget(connection)
        connection.owner = owner
        ours = self._of_owner.setdefault(owner, {})
        ours[connection] = None
        if len(ours) > most:
            next(iter(ours)).end()

    def forget(self, connection: Connection) -> None:
        """Count the connection no longer."""
        timer = self._unknown.pop(connection, None)
        if timer is not None:
            timer.cancel()
        ours = self._of_owner.get(connection.owner or "", {})
        ours.pop(connection, None)
        if not ours:
            self._of_owner.pop(connection.owner or "", None)

    async def _wait_for_room(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return once another unknown connection may be there; the oldest ends for it."""
        while len(self._unknown) >= self._most_unknown:
            oldest = next(iter(self._unknown))
            if loop.time() - oldest.since >= self._undisturbed_s:
                oldest.end()
            else:
                await asyncio.sleep(_WAIT_S)


async def _serve(connection: Connection, accepted: socket.socket, serve: _ServeConnection) -> None:
    try:
        await serve(connection, accepted)
    except OSError:  # the TLS handshake came to nothing, which says nothing about this manager
        connection.closed()
        accepted.close()


def allow_files() -> int:
    """Raise this process's soft limit of open files to its hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
