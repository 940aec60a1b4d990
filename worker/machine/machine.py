"""`makara join`: the process that lends this machine to a manager, until it is told to end.

It holds one connection outwards and makes it again whenever it ends. Losing the manager ends no VM: its agent
sees to that by itself. When this process is told to end (SIGTERM, Ctrl-C), the VM ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import NoReturn

import httpx
import psutil
import websockets
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect

from ...protocol.frames import read_refusal
from ...protocol.machines import JOIN_HEADER, Challenge, MachineOrders, MachineReport, machine_id
from ..agent.connection import until_first
from ..memory_watch import total_bytes
from .identity import Identity, WrongFolder
from .leased import LeasedVm

log = logging.getLogger("makara.machine")

_LOOK_S = 0.5  # between two looks at the agent
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0
_CALL_S = 30.0


class Refused(Exception):
    """The manager's own word that this machine has no place with it."""


class Machine:
    """One machine and its connection. `run` goes on until it is cancelled or refused."""

    def __init__(
        self,
        url: str,
        identity: Identity,
        vm: LeasedVm,
        *,
        token: str | None,
        name: str,
        tls: ssl.SSLContext,
    ) -> None:
        self._url = url
        self._identity = identity
        self._vm = vm
        self._token = token
        self._name = name
        self._tls = tls
        self._orders: MachineOrders | None = None
        self._memory_bytes = total_bytes()
        self._met = False  # its manager has answered this process

    async def run(self) -> NoReturn:
        """Raises `Refused`, and `WrongFolder` if another manager answers from the beginning."""
        delay_s = _FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                await self._connect()
            except websockets.exceptions.InvalidStatus as error:
                self._take_answer(error.response.status_code, bytes(error.response.body))
            except WrongFolder as error:
                if not self._met:
                    raise
                log.warning("%s: %s", self._url, error)  # its own may come back
            except (
                OSError,
                TimeoutError,
                ValidationError,
                httpx.HTTPError,
                websockets.exceptions.WebSocketException,
            ) as error:
                log.warning("no connection to the manager at %s: %s", self._url, error or repr(error))
            if time.monotonic() - began > _LONGEST_RETRY_S:
                delay_s = _FIRST_RETRY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)

    def end(self) -> None:
        """Have the VM end, if this machine is one. Blocking."""
        self._vm.obey(MachineOrders(version=0))

    async def _connect(self) -> None:
        """One connection, from its opening to its end."""
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
            ssl=self._tls if self._url.startswith("https") else None,
        ) as connection:
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
        """Obey the newest orders, and report whenever that changes something."""
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
            await asyncio.sleep(_LOOK_S if self._orders is not None else _LOOK_S / 10)


async def _run(machine: Machine) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await until_first(machine.run(), told.wait())


def _serve(machine: Machine) -> None:
    """Until this process is told to end, or its manager refuses this machine: the VM ends with it.

    Raises `Refused`, and `WrongFolder`, by which the VM goes on: whoever answers is not its manager.
    """
    try:
        asyncio.run(_run(machine))
    except Refused:
        machine.end()
        raise
    machine.end()


def main() -> None:
    """`python -m makara.worker.machine URL ...`: `makara join` checks what a user gives, and runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--ca-file", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", default=socket.gethostname())
    parser.add_argument("--address")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        ca = options.ca_file.read_text() if options.ca_file is not None else None
        identity = Identity(options.folder)
        machine = Machine(
            options.url,
            identity,
            LeasedVm(options.folder, url=options.url, ca=ca, address=options.address),
            token=options.token_file.read_text().strip() if options.token_file is not None else None,
            name=options.name,
            tls=ssl.create_default_context(cadata=ca),
        )
        _serve(machine)
    except (Refused, WrongFolder) as error:
        raise SystemExit(f"makara: {error}") from error
