"""Links: one connection between each two members of a generation that share a group.

gloo tries for minutes to reach an unreachable peer, and waits for ever on a connection that was cut between
two living ends. So before groups are opened each member connects to those it will share one with, in both
directions; then one connection of each pair stays open for as long as the generation lasts, with TCP
keep-alive, so that a cut link, a vanished machine and an ended process are noticed within `bound_s`, by name.

Both ends prove that they know the generation's key, which the manager gave to its members. Nothing else is
sent except the message with which a member leaves. While members reach each other, unauthenticated peers hold
only a bounded number of connections, the oldest of which give way to new ones; once all members are reached,
the listening socket is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..keepalive import keep_alive
from .gloo import split_endpoint

log = logging.getLogger("makara.links")

_LINE_BYTES = 1024
_RETRY_S = 0.2
_BYE = b"bye\n"
_HELLO_PART = 0.25  # of the bound: how long an incoming connection has to authenticate; members then retry
_SPARE = 64  # unauthenticated connections, in addition to one for each member

OnLost = Callable[[int, Exception], None]


class NotAMember(Exception):
    """The other end does not know the generation's key, or does not speak this protocol."""


_REFUSALS = (OSError, EOFError, ValueError, NotAMember, asyncio.LimitOverrunError)
"""The errors of a connection that is not established."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """A member's identity: the generation, its rank there, and the key of that generation."""

    generation: int
    rank: int
    key: bytes

    def proof(self, role: str, source: int, target: int, *nonces: str) -> str:
        text = "|".join((role, str(self.generation), str(source), str(target), *nonces))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()


class Links:
    """One member's links. It listens on `address` from the beginning; one thread serves them all.

    First `reach`, then, when all have reached all, `watch`.
    """

    def __init__(self, identity: MemberIdentity, address: str, bound_s: float, num_members: int = 1) -> None:
        self._identity = identity
        self._bound_s = bound_s
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.endpoint = f"{address}:{self._socket.getsockname()[1]}"
        self._on_lost: OnLost | None = None
        self._kept: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._most_unknown = num_members + _SPARE
        self._unknown: dict[asyncio.StreamWriter, None] = {}  # unauthenticated connections, oldest first
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._closed = False
        name = f"links-g{identity.generation}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def reach(self, endpoints: Mapping[int, str]) -> dict[int, str]:
        """Connect to these ranks in parallel, with retries for `bound_s`; returns {rank not reached: why}.

        Blocking. A rank is reached when both ends have authenticated.
        """
        return asyncio.run_coroutine_threadsafe(self._reach_all(endpoints), self._loop).result()

    def watch(self, ranks: Collection[int], on_lost: OnLost) -> None:
        """From now on call `on_lost(rank, why)`, on the links' thread, for each of `ranks` that is lost
        without having left."""
        self._loop.call_soon_threadsafe(self._begin_watch, ranks, on_lost)

    def close(self) -> None:
        """Tell all members that this one leaves, and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._closing.set)

    def leave(self) -> None:
        """Like `close`, but returns only when the message is sent, so that the process may end."""
        self.close()
        self._thread.join()

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._answer, sock=self._socket, limit=_LINE_BYTES)
        await self._closing.wait()
        self._stop_listening()
        kept, self._kept = self._kept, {}
        for writer in kept.values():
            writer.write(_BYE)
            writer.close()

    def _stop_listening(self) -> None:
        assert self._server is not None, "the thread begins with it"
        self._server.close()
        for writer in self._unknown:
            writer.transport.abort()

    def _begin_watch(self, ranks: Collection[int], on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._stop_listening()  # all have reached all
        for rank in ranks:
            if rank not in self._kept and rank not in self._left:
                on_lost(rank, ConnectionResetError("its link was closed before it was watched"))

    # ---- connecting ------------------------------------------------------------------------------------

    async def _reach_all(self, endpoints: Mapping[int, str]) -> dict[int, str]:
        outcomes = await asyncio.gather(*(self._reach(rank, where) for rank, where in endpoints.items()))
        return {rank: why for rank, why in zip(endpoints, outcomes, strict=True) if why}

    async def _reach(self, rank: int, endpoint: str) -> str:
        why = "no answer"
        try:
            async with asyncio.timeout(self._bound_s):
                while True:
                    try:
                        await self._connect(rank, endpoint)
                        return ""
                    except _REFUSALS as error:
                        why = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            return f"rank {rank} at {endpoint} was not reached in {self._bound_s:g} s: {why}"

    async def _connect(self, rank: int, endpoint: str) -> None:
        host, port = split_endpoint(endpoint)
        reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES)
        stays = False
        try:
            me, nonce = self._identity, secrets.token_hex(16)
            (theirs,) = await _read(reader, "nonce")
            proof = me.proof("hello", me.rank, rank, theirs, nonce)
            _write(writer, rank=str(me.rank), nonce=nonce, proof=proof)
            (answer,) = await _read(reader, "proof")
            if not hmac.compare_digest(answer, me.proof("welcome", me.rank, rank, theirs, nonce)):
                raise NotAMember(f"{endpoint} does not know the key of generation {me.generation}")
            stays = me.rank < rank  # else the direction is proved, and the other's connection is kept
        finally:
            if not stays:
                writer.close()
        if stays:
            self._keep(rank, reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle an incoming connection, of a member or a stranger."""
        rank = None
        if len(self._unknown) >= self._most_unknown:
            oldest = next(iter(self._unknown))  # not a member, or one that will retry
            del self._unknown[oldest]
            oldest.transport.abort()
        self._unknown[writer] = None
        try:
            async with asyncio.timeout(_HELLO_PART * self._bound_s):
                rank = await self._admit(reader, writer)
        except _REFUSALS as error:  # a `TimeoutError` is an `OSError`
            log.warning("a connection to %s is refused: %r", self.endpoint, error)
        finally:
            self._unknown.pop(writer, None)
        if rank is not None and rank < self._identity.rank:
            self._keep(rank, reader, writer)
        else:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        me, nonce = self._identity, secrets.token_hex(16)
        _write(writer, nonce=nonce)
        said, theirs, proof = await _read(reader, "rank", "nonce", "proof")
        rank = int(said)
        if not hmac.compare_digest(proof, me.proof("hello", rank, me.rank, nonce, theirs)):
            raise NotAMember(f"whoever says to be rank {rank} does not know the key of this generation")
        _write(writer, proof=me.proof("welcome", rank, me.rank, nonce, theirs))
        await writer.drain()
        return rank

    # ---- watching --------------------------------------------------------------------------------------

    def _keep(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = self._kept.get(rank)
        if before is not None:  # its first try was answered too late
            before.close()
        keep_alive(writer.get_extra_info("socket"), self._bound_s)
        self._kept[rank] = writer
        task = asyncio.create_task(self._watch(rank, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Watch a connection until the other end leaves, or is lost."""
        why: Exception = ConnectionResetError("its process has ended")
        try:
            said = await reader.readline()
        except (OSError, ValueError) as error:
            said, why = b"", error
        if self._kept.get(rank) is not writer:
            return
        del self._kept[rank]
        writer.close()
        if said == _BYE:
            self._left.add(rank)
        elif self._on_lost is not None:
            self._on_lost(rank, why)


async def _read(reader: asyncio.StreamReader, *names: str) -> tuple[str, ...]:
    """Read these entries of the object that the other end sends."""
    value = json.loads(await reader.readuntil(b"\n"))
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in names):
        raise NotAMember(f"expected an object with {', '.join(names)}")
    return tuple(value[name] for name in names)


def _write(writer: asyncio.StreamWriter, **values: str) -> None:
    writer.write(json.dumps(values).encode() + b"\n")
