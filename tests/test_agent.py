"""The agent against a manager that a test scripts, with trainers that only pretend."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest
from makara.worker.agent import Agent
from makara.worker.bounds import MOST_METRICS
from makara.worker.messages import (
    BootConfig,
    Credential,
    JobSettings,
    Message,
    Orders,
    Phase,
    Report,
    ReportAck,
    StepMetrics,
    StoreConfig,
    Welcome,
    WorkerReport,
)
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request, Response

TIMEOUT_S = 30.0


def bundle(text: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        entry = tarfile.TarInfo("train.py")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    return data.getvalue()


class Manager:
    """Answers as it is told. `report(...)` waits for one that has what is wanted."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode
        self.bundle = bundle()
        self.heartbeat_s = 3600.0  # what arrives was not a heartbeat
        self.refuses = False
        self.tokens: list[str] = []  # shown at each connection
        self.connection: ServerConnection | None = None
        self.reports: list[Report] = []
        self._changed = asyncio.Condition()
        self._server: Server | None = None
        self._port = 0
        self._version = 0

    async def open(self) -> None:
        self._server = await serve(self._serve, "127.0.0.1", self._port, process_request=self._answer)
        self._port = self._server.sockets[0].getsockname()[1]

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
            device_kind="cpu",
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
        await self.send(Orders(**{**values, **changes}))
        return self._version

    async def send(self, message: Message) -> None:
        await self.until(lambda: self.connection is not None)
        assert self.connection is not None
        await self.connection.send(message.model_dump_json())

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
        await connection.send(Welcome(heartbeat_s=self.heartbeat_s, server_time=0.0).model_dump_json())
        await self._note(lambda: setattr(self, "connection", connection))
        try:
            async for frame in connection:
                report = Report.model_validate_json(frame)
                await self._note(lambda report=report: self.reports.append(report))
        except ConnectionClosedError:
            pass  # a test ended it
        if self.connection is connection:
            self.connection = None

    async def _note(self, change: Callable[[], object]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    def _answer(self, _connection: ServerConnection, request: Request) -> Response | None:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if request.path.endswith("/secrets"):
            return _response(HTTPStatus.OK, json.dumps({"KEY": "value"}).encode())
        if request.path.endswith("/bundle"):
            return _response(HTTPStatus.OK, self.bundle)
        assert request.path == "/api/v1/agents/v1"
        self.tokens.append(token)
        return _response(HTTPStatus.FORBIDDEN, b"") if self.refuses else None


def _response(status: HTTPStatus, body: bytes) -> Response:
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

    def run(scenario: Scenario, mode: str = "plain") -> None:
        async def main() -> None:
            manager = Manager(tmp_path, mode)
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
        assert after <= before or mode == "survived"

    return run


async def ends(agent: asyncio.Task[None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await agent


def test_it_joins_with_its_secret_and_comes_back_with_the_token_that_it_was_given(
    play: Callable[..., None],
) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.send(Credential(token="mine", valid_for_s=60.0))
        await manager.order()
        await manager.worker(lambda worker: worker.phase is Phase.IDLE)
        assert manager.connection is not None
        await manager.connection.close(1012)
        await manager.until(lambda: len(manager.tokens) == 2)
        assert manager.tokens == ["join-me", "mine"]
        assert (manager.folder / "worker.token").stat().st_mode & 0o777 == 0o600

    play(scenario)


def test_it_comes_back_however_closely_a_change_precedes_the_end_of_its_connection(
    play: Callable[..., None],
) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        for hops in range(16):  # of the event loop, that the agent and this manager share
            await manager.order()
            connection, manager.connection = manager.connection, None
            assert connection is not None
            for _ in range(hops):
                await asyncio.sleep(0)
            connection.transport.abort()

    play(scenario)


def test_a_change_is_reported_at_once_and_old_orders_are_passed_over(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order()
        await manager.order("train")
        found = await manager.worker(lambda worker: worker.phase is Phase.RUNNING)
        assert (found.worker, found.incarnation, found.step) == ("v1.0", 1, 2)
        await manager.order("idle", version=1)
        await manager.order("train")
        await manager.worker(lambda worker: worker.step == 4)
        steps = [report.workers[0].step for report in manager.reports]
        assert steps == sorted(steps)
        assert manager.reports[-1].orders_version == 4

    play(scenario)


def test_metrics_are_repeated_until_the_manager_has_them(play: Callable[..., None]) -> None:
    def steps(report: Report) -> list[int]:
        return [metrics.step for metrics in report.metrics]

    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order()
        first = await manager.report(lambda report: steps(report) == [1])
        await manager.order()
        await manager.report(lambda report: steps(report) == [1, 2])
        await manager.send(ReportAck(sequence=first.sequence))
        await manager.order()
        await manager.report(lambda report: steps(report) == [2, 3])
        assert manager.connection is not None
        last = max(report.sequence for report in manager.reports)
        await manager.connection.close(1012)
        again = await manager.report(lambda report: report.sequence > last)
        assert steps(again) == [2, 3]

    play(scenario)


def test_an_acknowledgement_says_nothing_of_what_was_not_sent_yet(tmp_path: Path) -> None:
    agent = Agent(Manager(tmp_path, "plain").boot())
    step = StepMetrics(step=24, generation=7, loss=1.0, grad_norm=1.0, seconds=1.0, samples=1)
    sent = agent._report()
    agent._add_metrics(step)
    agent._accept(ReportAck(sequence=sent.sequence).model_dump_json())
    assert agent._report().metrics == [step]


def test_metrics_of_a_long_time_without_a_manager_go_in_several_reports(tmp_path: Path) -> None:
    agent = Agent(Manager(tmp_path, "plain").boot())
    steps = [
        StepMetrics(step=n, generation=1, loss=1.0, grad_norm=1.0, seconds=1.0, samples=1)
        for n in range(MOST_METRICS + 2)
    ]
    for step in steps:
        agent._add_metrics(step)
    first = agent._report()
    assert first.metrics == steps[:MOST_METRICS]
    agent._accept(ReportAck(sequence=first.sequence).model_dump_json())
    assert agent._report().metrics == steps[MOST_METRICS:]


def test_a_manager_that_does_not_know_the_vm_ends_it(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, agent: asyncio.Task[None]) -> None:
        await manager.order()
        await manager.worker(lambda worker: worker.phase is Phase.IDLE)
        manager.refuses = True
        assert manager.connection is not None
        await manager.connection.close(1012)
        await ends(agent)

    play(scenario)


def test_a_connection_closed_as_refused_ends_the_vm_and_an_order_to_shut_down_too(
    play: Callable[..., None],
) -> None:
    async def refused(manager: Manager, agent: asyncio.Task[None]) -> None:
        await manager.until(lambda: manager.connection is not None)
        assert manager.connection is not None
        await manager.connection.close(4003, "refused")
        await ends(agent)

    async def ordered(manager: Manager, agent: asyncio.Task[None]) -> None:
        await manager.order()
        await manager.worker(lambda worker: worker.phase is Phase.IDLE)
        await manager.order("shutdown")
        await ends(agent)

    play(refused)
    play(ordered)


def test_an_orphan_has_its_trainers_hold_before_it_ends(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, agent: asyncio.Task[None]) -> None:
        await manager.order("train", orphan_timeout_s=1.0)
        await manager.worker(lambda worker: worker.phase is Phase.RUNNING)
        await manager.close()
        await ends(agent)
        assert (manager.folder / "held").exists()

    play(scenario)


def test_a_trainer_without_beats_is_killed_and_replaced(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order(lease_s=0.6)
        dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
        assert dead.failure is not None
        assert (dead.incarnation, dead.failure.kind) == (1, "lease")
        await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)

    play(scenario, mode="silent")


def test_a_trainer_that_takes_long_to_start_is_left_alone(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        manager.heartbeat_s = 0.05
        await manager.order(lease_s=0.1)
        await manager.until(lambda: len(manager.reports) > 20)  # many leases later
        await manager.order()
        await manager.worker(lambda worker: worker.phase is Phase.IDLE)
        assert {report.workers[0].incarnation for report in manager.reports} <= {0, 1}

    play(scenario, mode="late")


def test_a_death_is_seen_although_a_child_keeps_the_socket(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order()
        dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
        assert dead.failure is not None
        assert dead.failure.exit_code == 3
        await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)

    play(scenario, mode="survived")


def test_a_setup_command_that_fails_is_the_users_error(play: Callable[..., None]) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order(setup="echo $KEY is not enough; exit 4")
        broken = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
        assert broken.failure is not None
        assert broken.failure.kind == "user"
        assert "ended with status 4" in broken.failure.message
        assert broken.failure.traceback == "value is not enough\n"
        assert broken.incarnation == 0

    play(scenario)


def test_an_agent_that_cannot_go_on_says_so_and_ends(play: Callable[..., None]) -> None:
    """A VM whose trainers were never started must not look healthy."""

    async def scenario(manager: Manager, agent: asyncio.Task[None]) -> None:
        manager.bundle = b"no archive"
        await manager.order()
        with pytest.raises(tarfile.ReadError):
            await ends(agent)

    play(scenario)
