"""The agent's connection to the manager, which reconnects for as long as the agent lives.

The end of a connection says nothing about the VM, with one exception: a `Refusal` from the manager that this
VM knows. A proxy's 403, another home's manager at the same address, an unreadable frame: all of these count
as not seeing the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.http11 import Response

from ...protocol.frames import Malformed, Misfit, UnknownOrder, read_refusal, read_to_agent
from ...protocol.messages import (
    BootConfig,
    Credential,
    Orders,
    ReportAck,
    Welcome,
)
from ..keepalive import end_if_unanswered
from .backoff import Backoff
from .shown_token import ShownToken
from .trust import trust

log = logging.getLogger("makara.agent")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0
_LEAST_REPORT_BYTES = 1 << 16
_GATHERED_S = 1.0  # for which news wait for the acknowledgement of the report before
_MALFORMED, _TOO_BIG = 4002, 1009


class Peer(Protocol):
    """The agent, as the connection sees it."""

    def obey(self, orders: Orders) -> None: ...

    def acknowledge(self, sequence: int) -> None: ...

    def report(self, limit_bytes: int, *, is_first: bool, may_beat: bool) -> tuple[str, bool]:
        """The next report as JSON of at most `limit_bytes`, and whether the manager acknowledges it.

        `is_first`: of this connection. `may_beat`: it may be a `Beat`, if only progress changed since the
        last one. A beat is not acknowledged each time.
        """
        ...


class ManagerConnection:
    """`run` keeps the connection; attributes hold its state. Runs on the agent's event loop only."""

    def __init__(self, boot: BootConfig, peer: Peer) -> None:
        self.heard_at = time.monotonic()
        """When the manager last sent something understood: orders, or an acknowledgement."""
        self.refusal: str | None = None  # why the manager does not know this VM (any more)
        self.misfit: str | None = None  # why manager and agent do not understand each other
        self.unknown_order: str | None = None
        """Why the newest orders cannot be carried out: this version does not know them."""
        self._boot = boot
        self._peer = peer
        self._trust: dict[str, Any] = {"ssl": trust(boot)} if boot.manager_url.startswith("https:") else {}
        self._token = ShownToken(Path(boot.directory) / "worker.token", boot.join_token)
        self._manager: str | None = None  # its identity, once it has admitted this VM
        self._heartbeat_s = 1.0
        self._answer_s = Orders.model_fields["link_timeout_s"].default
        self._report_limit = self._most_bytes = Welcome.model_fields["max_report_bytes"].default
        self._takes_beats = False
        self._welcomed = asyncio.Event()
        # Reset for each connection, since a manager with a restored journal counts from a smaller number.
        self._newest = 0
        self._dirty = asyncio.Event()
        self._answered = asyncio.Event()  # the manager has acknowledged a report since the last was sent

    def changed(self) -> None:
        """Note that there is something new to report."""
        self._dirty.set()

    def excuse(self, stood_still_s: float) -> None:
        """Do not count the time in which this VM itself was suspended as the manager's silence."""
        self.heard_at = min(time.monotonic(), self.heard_at + stood_still_s)

    @property
    def token(self) -> str:
        """The token to show: the join token, until the manager has issued a worker token."""
        return self._token.text

    async def run(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            before = self.heard_at
            await self._connect()
            if self.heard_at > before:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _connect(self) -> None:
        """Serve one connection, from its opening to its end."""
        self._welcomed.clear()
        self._takes_beats = False
        self._newest = 0
        self._answered.set()
        try:
            async with connect(
                self._boot.manager_url.replace("http", "ws", 1) + f"/api/v1/agents/{self._boot.vm}",
                additional_headers={"Authorization": f"Bearer {self.token}"},
                max_size=1 << 28,
                proxy=None,
                **self._trust,
            ) as connection:
                # The library's own keep-alive would wait behind a full send buffer.
                end_if_unanswered(connection.transport.get_extra_info("socket"), self._answer_s)
                await until_first(self._receive(connection), self._send(connection))
        except Malformed as error:
            log.error("the manager sent a frame that cannot be read: %s", error)
        except websockets.exceptions.InvalidStatus as error:
            self._take_answer(error.response)
        except websockets.exceptions.ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == _TOO_BIG:
                self._most_bytes = max(self._report_limit // 2, _LEAST_REPORT_BYTES)
            log.warning("connection to the manager closed: %s", error)
        except (OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
            log.warning("cannot reach the manager at %s: %r", self._boot.manager_url, error)

    def _take_answer(self, response: Response) -> None:
        refusal = read_refusal(bytes(response.body))
        if refusal is None or refusal.refused != self._boot.vm:
            log.warning("%s answers HTTP %d", self._boot.manager_url, response.status_code)
        elif self._manager not in (None, refusal.manager):
            log.warning("%s is another manager than this VM's", self._boot.manager_url)
        else:
            log.error("the manager refuses this VM: %s", refusal.reason)
            self.refusal = refusal.reason

    async def _receive(self, connection: ClientConnection) -> None:
        async for frame in connection:
            try:
                self._take(frame)
            except Malformed:
                await connection.close(_MALFORMED, "malformed frame")
                raise

    def _take(self, frame: str | bytes) -> None:
        try:
            message = read_to_agent(frame)
        except Misfit as misfit:
            if self.misfit is None:
                log.error("%s: holding", misfit)
            self.misfit = str(misfit)
            self._welcomed.set()
            return
        except UnknownOrder as error:
            if self.unknown_order is None:
                log.error("orders that this version does not know: %s: holding", error)
            self.unknown_order = f"it was ordered what its version does not know: {error}"
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif self.misfit is None and message is not None:
            self._hear(message)

    def _welcome(self, welcome: Welcome) -> None:
        self.misfit = None
        self._manager = welcome.manager or None
        self._takes_beats = welcome.beats
        self._heartbeat_s = welcome.heartbeat_s
        self._report_limit = min(welcome.max_report_bytes, self._most_bytes)
        self._welcomed.set()

    def _hear(self, message: Orders | ReportAck | Credential) -> None:
        match message:
            case Credential(token=token):
                self._token.renew(token)
                return  # not enough to count as hearing the manager
            case ReportAck(sequence=sequence):
                self._answered.set()
                self._peer.acknowledge(sequence)
            case Orders() as orders:
                self._answer_s = orders.link_timeout_s
                if orders.version >= self._newest:
                    self._newest = orders.version
                    self.unknown_order = None
                    self._peer.obey(orders)
        self._token.write()
        if self.unknown_order is None:
            self.heard_at = time.monotonic()
        self.refusal = None

    async def _send(self, connection: ClientConnection) -> None:
        await self._welcomed.wait()  # the welcome says how large a report may be
        is_first = True
        while True:
            self._dirty.clear()
            may_beat = self._takes_beats and not is_first
            text, is_acknowledged = self._peer.report(
                self._report_limit, is_first=is_first, may_beat=may_beat
            )
            if is_acknowledged:
                self._answered.clear()
            try:
                await connection.send(text)
            except websockets.exceptions.ConnectionClosed:
                # `_receive` handles what has arrived before, and the reason of closing.
                await asyncio.Event().wait()
            is_first = False
            # Before Python 3.12 `asyncio.wait_for` loses a cancellation that coincides with the result.
            with contextlib.suppress(TimeoutError):  # nothing new: send the heartbeat
                async with asyncio.timeout(self._heartbeat_s):
                    await self._dirty.wait()
            # If steps are faster than the manager, several of them share one report.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHERED_S):
                    await self._answered.wait()


async def until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all until one ends, and cancel the others; raises that one's exception."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
