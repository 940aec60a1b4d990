"""The agent: the one process of Makara on a VM that talks to the manager.

It joins with a one-time secret, keeps one connection, runs one trainer per device, and passes orders down
and reports up. It decides nothing about the job. Losing the manager disturbs no trainer: the agent
reconnects, and only after `orphan_timeout_s` without one does it have a checkpoint made and end the VM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import websockets
from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect

from .bounds import MOST_METRICS
from .bundles import BundleError, SetupFailed, fetch_secrets, prepare_bundle
from .messages import (
    TO_AGENT,
    BootConfig,
    Credential,
    DeviceInfo,
    Failure,
    Orders,
    Phase,
    Report,
    ReportAck,
    StepMetrics,
    Welcome,
    WorkerReport,
)
from .notices import remaining_notice_s
from .trainers import TrainerProcess

log = logging.getLogger("makara.agent")

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_WATCH_S = 0.25
_UNSENT = 0  # in place of the number of the report that carried it


class Refused(Exception):
    """The manager does not know this VM (any more): nothing is left to do here."""


class Agent:
    """Everything runs on one event loop; trainers are processes."""

    def __init__(self, boot: BootConfig) -> None:
        self._boot = boot
        self._directory = Path(boot.directory)
        self._token_file = self._directory / "worker.token"
        self._devices = find_devices(boot)
        self._orders: Orders | None = None
        self._trainers = [
            TrainerProcess(
                f"{boot.vm}.{index}", self._directory, boot.address, self._changed, self._add_metrics
            )
            for index in range(len(self._devices))
        ]
        self._broken_setup: Failure | None = None
        self._ordered = asyncio.Event()
        self._metrics: list[tuple[int, StepMetrics]] = []
        self._sequence = 0
        self._heartbeat_s = 1.0
        self._dirty = asyncio.Event()
        self._ended = asyncio.Event()
        self._leaving: str | None = None
        self._last_contact = time.monotonic()

    async def run(self) -> None:
        """Serve until the manager says shutdown, refuses this VM, or stays away for the orphan timeout."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        try:
            # What one of them raises ends the agent: a VM that does nothing must not look healthy.
            await _until_first(self._stay_connected(), self._watch(), self._serve_job(), self._ended.wait())
        except Refused as refusal:
            log.error("the manager refuses this VM: %s", refusal)
        finally:
            for trainer in self._trainers:
                trainer.kill()

    # ---- the connection ------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                async with connect(
                    self._url(),
                    additional_headers={"Authorization": f"Bearer {self._token()}"},
                    max_size=1 << 28,
                    proxy=None,
                ) as connection:
                    delay_s = _FIRST_RETRY_S
                    await _until_first(self._receive(connection), self._send_reports(connection))
            except websockets.exceptions.InvalidStatus as error:
                if error.response.status_code in (401, 403, 404):
                    raise Refused(f"HTTP {error.response.status_code}") from error
                log.warning("manager at %s answers %s", self._boot.manager_url, error)
            except websockets.exceptions.ConnectionClosed as error:
                if error.rcvd is not None and error.rcvd.code in (4001, 4003):
                    raise Refused(error.rcvd.reason) from error
                log.warning("connection to the manager closed: %s", error)
            except (OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
                log.warning("cannot reach the manager at %s: %r", self._boot.manager_url, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)

    def _url(self) -> str:
        return self._boot.manager_url.replace("http", "ws", 1) + f"/api/v1/agents/{self._boot.vm}"

    def _token(self) -> str:
        return self._token_file.read_text() if self._token_file.exists() else self._boot.join_token

    async def _receive(self, connection: ClientConnection) -> None:
        async for frame in connection:
            self._last_contact = time.monotonic()
            self._accept(frame)

    async def _send_reports(self, connection: ClientConnection) -> None:
        while True:
            self._dirty.clear()
            try:
                await connection.send(self._report().model_dump_json())
            except websockets.exceptions.ConnectionClosed:
                await self._ended.wait()  # `_receive` takes what has arrived before, and says how it closed
            # `asyncio.wait_for` loses a cancellation that comes with what it waits for, before Python 3.12.
            with contextlib.suppress(TimeoutError):  # nothing new: the next report is the heartbeat
                async with asyncio.timeout(self._heartbeat_s):
                    await self._dirty.wait()

    def _accept(self, frame: str | bytes) -> None:
        match TO_AGENT.validate_json(frame):
            case Welcome(heartbeat_s=heartbeat_s):
                self._heartbeat_s = heartbeat_s
            case Credential(token=token):
                write_secret(self._token_file, token)
            case ReportAck(sequence=sequence):
                self._metrics = [(n, item) for n, item in self._metrics if n == _UNSENT or n > sequence]
                if len(self._metrics) >= MOST_METRICS:
                    self._changed()  # more than one report holds: on with it
            case Orders() as orders:
                self._obey(orders)

    # ---- orders and reports --------------------------------------------------------------------------------

    def _obey(self, orders: Orders) -> None:
        if self._orders is not None and orders.version < self._orders.version:
            return
        self._orders = orders
        self._ordered.set()
        if orders.action == "shutdown":
            log.info("ordered to shut down")
            self._ended.set()
            return
        for trainer in self._trainers:
            trainer.give(orders)
        self._changed()

    async def _serve_job(self) -> None:
        """Fetch the job's code and keep its trainers running."""
        while self._orders is None or self._orders.job is None:
            self._ordered.clear()
            await self._ordered.wait()
        job = self._orders.job
        while True:
            try:
                secrets = await fetch_secrets(self._boot, self._token())
                environment = {**job.envs, **secrets}
                bundle = await prepare_bundle(self._boot, self._token(), job, environment)
                break
            except SetupFailed as error:
                self._broken_setup = Failure(kind="user", message=str(error), traceback=error.output)
                self._changed()
                await self._ended.wait()  # the manager ends this VM when it has heard
                return
            except (BundleError, httpx.HTTPError, OSError) as error:
                log.warning("cannot fetch the job's code: %r", error)
                await asyncio.sleep(1.0)
        await _until_first(*(trainer.run(bundle, environment) for trainer in self._trainers))

    def _report(self) -> Report:
        self._sequence += 1
        told = [(number or self._sequence, item) for number, item in self._metrics[:MOST_METRICS]]
        self._metrics[:MOST_METRICS] = told
        return Report(
            vm=self._boot.vm,
            sequence=self._sequence,
            orders_version=self._orders.version if self._orders else 0,
            address=self._boot.address,
            devices=self._devices,
            workers=[self._worker_report(trainer) for trainer in self._trainers],
            metrics=[item for _, item in told],
            notice_deadline_s=remaining_notice_s(self._directory),
            leaving=self._leaving,
        )

    def _worker_report(self, trainer: TrainerProcess) -> WorkerReport:
        broken = self._broken_setup
        return trainer.report.model_copy(update={"phase": Phase.EXITED, "failure": broken} if broken else {})

    def _add_metrics(self, metrics: StepMetrics) -> None:
        self._metrics.append((_UNSENT, metrics))  # `_report` numbers it
        self._changed()

    def _changed(self) -> None:
        self._dirty.set()

    # ---- the watch -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        noticed = False
        while True:
            lease_s = self._orders.lease_s if self._orders else 60.0
            before = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            stalled = time.monotonic() - before > lease_s / 2
            for trainer in self._trainers:
                if stalled:
                    trainer.renew_lease()
                trainer.check_lease(lease_s)
            if not noticed and remaining_notice_s(self._directory) is not None:
                noticed = True
                self._changed()
            alone_s = time.monotonic() - self._last_contact
            if alone_s > (self._orders.orphan_timeout_s if self._orders else 600.0):
                await self._end_as_orphan(alone_s)
                return

    async def _end_as_orphan(self, alone_s: float) -> None:
        """Have a checkpoint published, then end: a lost manager must not bill for ever."""
        log.error("no manager for %.0f s: saving a checkpoint, then ending this VM", alone_s)
        self._leaving = "orphaned"
        if self._orders is not None:
            for trainer in self._trainers:
                trainer.give(self._orders.model_copy(update={"hold": True}))
            stop = time.monotonic() + self._orders.orphan_save_s
            while time.monotonic() < stop and any(t.running for t in self._trainers):  # noqa: ASYNC110
                await asyncio.sleep(_WATCH_S)
        self._ended.set()


async def _until_first(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all until one ends, and cancel the others; raises what that one raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def find_devices(boot: BootConfig) -> list[DeviceInfo]:
    """The VM's devices: its NVIDIA GPUs if it has a driver and the boot file allows, else the processor."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if boot.device_kind != "cpu" else []
    if boot.device_kind == "cuda" and not gpus:
        raise RuntimeError("device_kind is cuda, but this VM has no NVIDIA driver")
    kind = "cuda" if gpus else "cpu"
    memory_bytes = boot.device_memory_bytes or psutil.virtual_memory().total // boot.num_devices
    return [
        DeviceInfo(kind=kind, name=f"{kind}{n}", memory_bytes=memory_bytes) for n in range(boot.num_devices)
    ]


def write_secret(path: Path, text: str) -> None:
    """Write `text` to a file that only this user can read, replacing it whole."""
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


def main() -> None:
    """`python -m makara.worker.agent BOOT_FILE`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m makara.worker.agent BOOT_FILE")
    try:
        boot = BootConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
    except (OSError, ValidationError) as error:
        raise SystemExit(f"boot file {sys.argv[1]}: {error}") from error
    asyncio.run(Agent(boot).run())


if __name__ == "__main__":
    main()
