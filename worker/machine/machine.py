"""`makara join`: the process that lends this machine to a manager, until it is told to end.

It keeps one outgoing connection, and reconnects. Losing the manager ends no VM: its agent handles that. Being
told to end (SIGTERM, Ctrl-C) is a notice for the VM: it has a grace to hand over, then it ends, the manager
is told that this machine leaves, and this process exits. A second signal ends the VM at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

import httpx
import psutil
import websockets
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect

from ...protocol.frames import read_refusal
from ...protocol.machines import JOIN_HEADER, Challenge, MachineOrders, MachineReport, machine_id
from ..agent.backoff import Backoff
from ..agent.connection import until_first
from ..memory_watch import total_bytes
from .identity import MachineIdentity, WrongFolder
from .leased import LeasedVm

log = logging.getLogger("makara.machine")

_LOOK_S = 0.5  # between two checks of the agent
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_CALL_S = 30.0
_GRACE_S = 30.0
_ALONE_S = 15.0  # how long to wait for an absent manager, without which no VM can take over the work
_GOODBYE_S = 3.0  # for the manager to hear that this machine leaves


class Refused(Exception):
    """The manager itself has refused this machine."""


class Machine:
    """One machine and its connection. `run` ends after `tell_to_leave`, or when refused.

    `grace_s`: how long its VM then has to hand over.
    """

    def __init__(
        self,
        url: str,
        identity: MachineIdentity,
        vm: LeasedVm,
        *,
        token: str | None,
        name: str,
        tls: ssl.SSLContext,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._url = url
        self._identity = identity
        self._vm = vm
        self._token = token
        self._name = name
        self._tls = tls
        self._grace_s = grace_s
        self._orders: MachineOrders | None = None
        self._memory_bytes = total_bytes()
        self._met = False  # whether its manager has answered this process
        self._connected = False
        self._has_left = False  # whether the manager was told
        self._told, self._hurried = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Run the machine. Raises `Refused`, which ends the VM, and `WrongFolder` if a different manager
        answers from the beginning, which does not end the VM."""
        try:
            await until_first(self._keep_connection(), self._leave())
        except Refused:
            await asyncio.to_thread(self._vm.end)
            raise

    def tell_to_leave(self) -> None:
        """Hand over and leave; when called again, leave at once. Call it on the event loop."""
        if self._told.is_set():
            self._hurried.set()
        self._told.set()

    async def _leave(self) -> None:
        """Once told to leave: let the VM hand over and end, and give the manager a moment to hear of it."""
        await self._told.wait()
        vm = await asyncio.to_thread(self._vm.leave, self._grace_s)
        if vm is not None:
            log.info("VM %s has %g s to hand over; another signal ends it at once", vm, self._grace_s)
            await self._hand_over()
            await asyncio.to_thread(self._vm.end)
        if self._connected:
            await asyncio.sleep(_GOODBYE_S)

    async def _hand_over(self) -> None:
        """Wait until the VM has ended, its time is over, or the manager is away."""
        connected_at = time.monotonic()
        stop = connected_at + self._grace_s
        while (now := time.monotonic()) < stop and not self._hurried.is_set():
            connected_at = now if self._connected else connected_at
            if now - connected_at > _ALONE_S:
                log.warning("the manager is away: nothing can be handed over")
                return
            if (await asyncio.to_thread(self._vm.obey, self._orders)).lease is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._hurried.wait()

    async def _keep_connection(self) -> None:
        """Reconnect until this machine has left."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            began = time.monotonic()
            try:
                await self._connect()
            except websockets.exceptions.InvalidStatus as error:
                self._take_answer(error.response.status_code, bytes(error.response.body))
            except WrongFolder as error:
                if not self._met:
                    raise
                log.warning("%s: %s", self._url, error)  # its own manager may come back
            except (
                OSError,
                TimeoutError,
                ValidationError,
                httpx.HTTPError,
                websockets.exceptions.WebSocketException,
            ) as error:
                log.warning("no connection to the manager at %s: %s", self._url, error or repr(error))
            finally:
                self._connected = False
            if self._has_left:
                return
            if time.monotonic() - began > _LONGEST_RETRY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _connect(self) -> None:
        """Serve one connection, from its opening to its end."""
        challenge = await self._challenge()
        headers = {"Authorization": self._identity.authorization(challenge)}
        self._met |= self._identity.manager == challenge.manager
        if self._token is not None and self._identity.manager is None:
            headers[JOIN_HEADER] = self._token
        self._orders = None
        async with connect(
            self._url.replace("http", "ws", 1) + "/api/v1/machines/connection",
            additional_headers=headers,
            proxy=None,
            close_timeout=_GOODBYE_S,
            ssl=self._tls if self._url.startswith("https") else None,
        ) as connection:
            self._connected = True
            self._identity.admitted_by(challenge.manager)
            log.info("joined %s as machine %s", self._url, machine_id(self._identity.public_key))
            if self._vm.address is None:
                self._vm.address = str(connection.local_address[0])
            await until_first(self._receive(connection), self._serve(connection))

    async def _challenge(self) -> Challenge:
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=_CALL_S) as client:
            answer = await client.get(f"{self._url}/api/v1/machines/challenge")
            answer.raise_for_status()
            return Challenge.model_validate_json(answer.content, extra="ignore")

    def _take_answer(self, status: int, body: bytes) -> None:
        refusal = read_refusal(body)
        if refusal is None or refusal.refused != machine_id(self._identity.public_key):
            log.warning("%s answers HTTP %d", self._url, status)
            return
        raise Refused(refusal.reason)

    async def _receive(self, connection: ClientConnection) -> None:
        async for frame in connection:
            self._orders = MachineOrders.model_validate_json(frame, extra="ignore")

    async def _serve(self, connection: ClientConnection) -> None:
        """Obey the newest orders, and report whenever that changes something; until this machine has left."""
        told: MachineReport | None = None
        while True:
            report = await asyncio.to_thread(self._vm.obey, self._orders)
            if report != told and self._orders is not None:
                told = report
                facts = {
                    "name": self._name,
                    "num_cpus": psutil.cpu_count() or 1,
                    "memory_bytes": self._memory_bytes,
                }
                await connection.send(report.model_copy(update=facts).model_dump_json())
            if told is not None and told.leaving and told.lease is None:
                self._has_left = True
                return
            await asyncio.sleep(_LOOK_S if self._orders is not None else _LOOK_S / 10)


async def _run(machine: Machine) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, machine.tell_to_leave)
    await machine.run()


def main() -> None:
    """`python -m makara.worker.machine URL ...`: `makara join` checks what a user gives, and runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--ca-file", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", default=socket.gethostname())
    parser.add_argument("--address")
    parser.add_argument("--grace", type=float, default=_GRACE_S)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        ca = options.ca_file.read_text() if options.ca_file is not None else None
        identity = MachineIdentity(options.folder)
        machine = Machine(
            options.url,
            identity,
            LeasedVm(options.folder, url=options.url, ca=ca, address=options.address),
            token=options.token_file.read_text().strip() if options.token_file is not None else None,
            name=options.name,
            tls=ssl.create_default_context(cadata=ca),
            grace_s=options.grace,
        )
        asyncio.run(_run(machine))
    except (Refused, WrongFolder) as error:
        raise SystemExit(f"makara: {error}") from error
