"""A manager's service in this process: a real journal, a provider that obeys, a clock set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core_script import MEMORY, spec
from makara.manager.config import ServerConfig
from makara.manager.core import Timing
from makara.manager.providers import Provider, Resource, ResourceStatus
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.planning import Choose, compute_plan
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.spec.job_spec import Resources, parse_spec
from makara.manager.spec.placement import Attempt, Offer
from makara.protocol.messages import BootConfig, DeviceInfo, Orders, Phase, Profiling, Report, WorkerReport

NEVER_S = 3600.0  # the test ticks by hand


@dataclass
class FakeProvider:
    """Every VM can be had."""

    vms: dict[str, ResourceStatus] = field(default_factory=dict)

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        self.vms.setdefault(attempt.vm, ResourceStatus.RUNNING)
        return attempt.vm

    def release(self, vm: str, attempts: int = 1) -> bool:
        self.vms.pop(vm, None)
        return True

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        return [resource for resource in self.list() if resource.vm == vm]

    def list(self) -> Sequence[Resource]:
        return [Resource(vm=vm, attempt=1, id=vm, status=status) for vm, status in self.vms.items()]

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return []

    def offers(self, resources: Resources) -> Sequence[Offer]:
        return []

    def console(self, vm: str, attempts: int = 1) -> str:
        return ""

    def close(self) -> None:
        pass


@dataclass
class FakeConnection:
    """An agent's connection that keeps what it was sent."""

    orders: list[Orders] = field(default_factory=list)

    def push(self, orders: Orders) -> None:
        self.orders.append(orders)

    def replaced(self) -> None:
        pass


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """A service and what is around it."""

    service: Service
    provider: Provider
    clock: Clock
    sequence: int = 0

    async def submit(self, job: str, owner: str | None = None, **changes: dict[str, Any]) -> None:
        await self.service.admission.submit(job, parse_spec(spec(**changes)), b"", {}, owner=owner)

    async def tick(self, seconds: float = 0.0) -> None:
        """Time passes, and all that follows from it is done."""
        self.clock.now += seconds
        self.service.tick()
        await self.settled()

    async def settled(self) -> None:
        """Until no job is being decided on."""
        loops = self.service._loops
        while loops._tasks:
            await asyncio.wait(loops._tasks)

    async def until(self, condition: Callable[[], object]) -> None:
        """Until threads have brought it about."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def vms(self, job: str) -> list[str]:
        return [vm.vm for vm in self.service.jobs[job].state.live_vms]

    async def report(self, job: str, vm: str, phase: Phase = Phase.IDLE, **changes: Any) -> None:
        await self.service.agents.report(job, self.report_of(vm, phase, **changes))

    def report_of(self, vm: str, phase: Phase = Phase.IDLE, **changes: Any) -> Report:
        self.sequence += 1
        worker = WorkerReport(worker=f"{vm}.0", incarnation=1, phase=phase, profiling=Profiling())
        return Report(
            vm=vm,
            sequence=self.sequence,
            orders_version=0,
            address="10.0.0.1",
            devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=MEMORY)],
            workers=[worker.model_copy(update=changes)],
        )


@asynccontextmanager
async def desk(
    home: Path,
    provider: Provider | None = None,
    timing: Timing | None = None,
    choose_plan: Choose = compute_plan,
    providers: Mapping[str, Provider] | None = None,
    **settings: Any,
) -> AsyncIterator[Desk]:
    """A service that started on `home`; closed, with its journal, in the end. `settings`: `ServerConfig`.

    `providers` are further ones than the local one.
    """
    clock, provider = Clock(), provider or FakeProvider()
    journal, tokens = SqliteJournal(home / "journal.sqlite3"), TokenStore(home / "tokens.sqlite3")
    config = ServerConfig(home=home, **{"tick_s": NEVER_S, "rest_factor": 0.0, **settings})
    known = {"local": provider, **(providers or {})}
    service = Service(config, journal, tokens, known, timing=timing, clock=clock, choose_plan=choose_plan)
    try:
        await service.start()
        yield Desk(service, provider, clock)
    finally:
        await service.close()
        tokens.close()
        journal.close()
