"""A manager that a test scripts, for a real agent whose trainers only pretend."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import psutil
import pytest
from makara.protocol.frames import read_report_or_beat
from makara.protocol.messages import (
    PROTOCOL,
    Beat,
    BootConfig,
    JobSettings,
    Message,
    Orders,
    Phase,
    Refusal,
    Report,
    ReportAck,
    StoreConfig,
    Welcome,
    WorkerReport,
)
from makara.worker.agent.agent import Agent
from s3_server import free_ports
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request, Response

TIMEOUT_S = 300.0  # of a wait for what comes at once on a machine with nothing else to do


def bundle(text: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        entry = tarfile.TarInfo("train.py")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    return data.getvalue()


class Manager:
    """Answers as it is told. `report(...)` waits for one that has what is wanted."""

    def __init__(self, folder: Path, mode: str, **boot: Any) -> None:
        """`boot`: fields of the VM's boot file."""
        self.folder, self.mode = folder, mode
        self._boot = boot
        self.bundle = bundle()
        self.max_report_bytes = self.frame_limit = 1 << 24
        self.heartbeat_s = 3600.0  # what arrives was not a heartbeat
        self.identity = "manager-1"
        self.protocol = PROTOCOL
        self.answer: Response | None = None  # to whoever would connect
        self.job_answers: list[Response] = []  # to the next who ask for code or secrets, the last one first
        self.sent = ""  # the newest orders
        self.tokens: list[str] = []  # shown at each connection
        self.connection: ServerConnection | None = None
        self.takes_beats = False
        self.reports: list[Report] = []
        self.beats: list[Beat] = []
        self.sizes: list[int] = []  # of the frames that they came in
        self._changed = asyncio.Condition()
        self._server: Server | None = None
        (self._port,) = free_ports(1)
        self._version = 0

    async def open(self) -> None:
        self._server = await serve(
            self._serve, "127.0.0.1", self._port, process_request=self._answer, max_size=self.frame_limit
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def boot(self) -> BootConfig:
        return BootConfig(
            vm="v1",
            job="job",
            manager_url=f"http://127.0.0.1:{self._port}",
            join_token="join-me",
            directory=str(self.folder),
            **{"device_kind": "cpu", **self._boot},
        )

    async def order(self, action: str = "idle", **changes: Any) -> int:
        """Send orders; returns their version."""
        self._version += 1
        job = JobSettings(
            job="job",
            entrypoint="train:build",
            seed=1,
            steps=9,
            global_batch_size=2,
            numerics="fast",
            store=StoreConfig(uri="file:///nowhere"),
            bundle_sha256=hashlib.sha256(self.bundle).hexdigest(),
            setup=changes.pop("setup", None),
            envs={"FAKE_TRAINER": self.mode},
        )
        values: dict[str, Any] = {"version": self._version, "action": action, "job": job, "lease_s": 20.0}
        self.sent = Orders(**{**values, **changes}).model_dump_json()
        await self.send_text(self.sent)
        return self._version

    async def acknowledge_all(self) -> None:
        """Say of each report that it is stored, for ever."""
        told = 0
        while True:
            await self.until(lambda told=told: bool(self.reports) and self.reports[-1].sequence > told)
            told = self.reports[-1].sequence
            await self.send(ReportAck(sequence=told))

    async def until_file(self, name: str) -> None:
        """Wait for a file in the VM's folder."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (self.folder / name).exists():  # noqa: ASYNC110  (another process writes it)
                await asyncio.sleep(0.01)

    async def send(self, message: Message) -> None:
        await self.send_text(message.model_dump_json())

    async def send_text(self, text: str) -> None:
        await self.until(lambda: self.connection is not None)
        assert self.connection is not None
        await self.connection.send(text)

    async def drop(self) -> None:
        """Close the connection, as a manager that restarts does."""
        await self.until(lambda: self.connection is not None)
        connection, self.connection = self.connection, None
        assert connection is not None
        await connection.close(1012)

    async def worker(self, wanted: Callable[[WorkerReport], bool]) -> WorkerReport:
        """The first report of the worker, from now or before, that has what is wanted."""
        return (await self.report(lambda report: wanted(report.workers[0]))).workers[0]

    async def report(self, wanted: Callable[[Report], bool]) -> Report:
        await self.until(lambda: any(wanted(report) for report in self.reports))
        return next(report for report in self.reports if wanted(report))

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(predicate)

    async def _serve(self, connection: ServerConnection) -> None:
        await connection.send(self._welcome().model_dump_json())
        await self._note(lambda: setattr(self, "connection", connection))
        try:
            async for frame in connection:
                self.sizes.append(len(frame))
                assert isinstance(frame, str)
                message = read_report_or_beat(frame)
                await self._note(lambda message=message: self._keep(message))
        except ConnectionClosedError:
            pass  # a test ended it
        if self.connection is connection:
            await self._note(lambda: setattr(self, "connection", None))

    def _keep(self, message: Report | Beat) -> None:
        if isinstance(message, Beat):
            self.beats.append(message)
        else:
            self.reports.append(message)

    def _welcome(self) -> Welcome:
        return Welcome(
            heartbeat_s=self.heartbeat_s,
            server_time=0.0,
            protocol=self.protocol,
            makara="9.9",
            manager=self.identity,
            max_report_bytes=self.max_report_bytes,
            beats=self.takes_beats,
        )

    async def _note(self, change: Callable[[], object]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def _answer(self, _connection: ServerConnection, request: Request) -> Response | None:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if self.job_answers and request.path.endswith(("/secrets", "/bundle")):
            return self.job_answers.pop()
        if request.path.endswith("/secrets"):
            return response(HTTPStatus.OK, json.dumps({"KEY": "value"}).encode())
        if request.path.endswith("/bundle"):
            return response(HTTPStatus.OK, self.bundle)
        assert request.path == "/api/v1/agents/v1"
        await self._note(lambda: self.tokens.append(token))
        return self.answer

    def refuse(self, identity: str | None = None) -> None:
        """From now on the VM is refused, by this manager or one of another identity."""
        refusal = Refusal(refused="v1", manager=identity or self.identity, reason="unknown token")
        self.answer = response(HTTPStatus.FORBIDDEN, refusal.model_dump_json().encode())


def response(status: HTTPStatus, body: bytes) -> Response:
    headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
    return Response(status.value, status.phrase, headers, body)


Scenario = Callable[[Manager, "asyncio.Task[None]"], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scenario against an agent; whatever is left of it is cancelled in the end."""
    fake = tmp_path / "trainer"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).parent / "fake_trainer.py"} "$@"\n')
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    # This manager acknowledges only what a test says.
    monkeypatch.setattr("makara.worker.agent.connection._GATHERED_S", 0.0)

    def run(scenario: Scenario, mode: str = "plain", **boot: Any) -> None:
        async def main() -> None:
            manager = Manager(tmp_path, mode, **boot)
            await manager.open()
            agent = asyncio.create_task(Agent(manager.boot()).run())
            try:
                await scenario(manager, agent)
            finally:
                agent.cancel()
                await asyncio.gather(agent, return_exceptions=True)
                await manager.close()

        before = set(psutil.Process(os.getpid()).children(recursive=True))  # servers that fixtures started
        asyncio.run(main())
        after = set(psutil.Process(os.getpid()).children(recursive=True))
        assert after <= before

    return run


def plays(
    mode: str = "plain", **boot: Any
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test of a scenario, which takes `manager` and `agent`, and fixtures, by name; see `play`."""

    def test_of(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        names = signature(scenario).parameters.keys()

        def test(play: Callable[..., None], **fixtures: Any) -> None:
            async def run(manager: Manager, agent: asyncio.Task[None]) -> None:
                own = {"manager": manager, "agent": agent}
                await scenario(**{name: own[name] for name in names & own}, **fixtures)

            play(run, mode, **boot)

        functools.update_wrapper(test, scenario)
        wanted = ["play", *(name for name in names if name not in ("manager", "agent"))]
        test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in wanted])  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return test_of


async def running(manager: Manager) -> None:
    """Have the VM train, and wait until it does."""
    await manager.order("train")
    await manager.worker(lambda worker: worker.phase is Phase.RUNNING)


async def ends(agent: asyncio.Task[None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await agent
