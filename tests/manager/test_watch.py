"""What the lists of a provider's VMs mean to a manager."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from core_script import spec
from in_service import FakeProvider
from makara.manager.config import ServerConfig
from makara.manager.core.facts import EndReason, VmEnded
from makara.manager.providers import Provider, ProviderError, Resource, ResourceStatus, Throttled
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.service.vms.watch import PollInterval
from makara.manager.spec.job_spec import JobSpec


class Cloud(FakeProvider):
    """A provider whose list fails while `is_away`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_lists = 0
        self.taken: dict[str, str] = {}  # by VM that it took back: why

    def list(self) -> Sequence[Resource]:
        self.num_lists += 1
        if self.is_away:
            raise ProviderError("503")
        gone = [
            Resource(vm=vm, attempt=1, id=vm, status=ResourceStatus.GONE, taken_back=why)
            for vm, why in self.taken.items()
        ]
        return [*super().list(), *gone]


async def _more_lists(cloud: Cloud, num: int) -> None:
    wanted = cloud.num_lists + num
    while cloud.num_lists < wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@asynccontextmanager
async def _service(config: ServerConfig, providers: Mapping[str, Provider]) -> AsyncIterator[Service]:
    journal, tokens = SqliteJournal(config.journal_path), TokenStore(config.home / "tokens.sqlite3")
    service = Service(config, journal, tokens, providers)
    try:
        yield service
    finally:
        await service.close()
        tokens.close()
        journal.close()


async def _play(home: Path) -> tuple[list[VmEnded], list[VmEnded]]:
    """The VMs that ended while the list failed, and once it works again without one of them."""
    cloud = Cloud()
    async with _service(ServerConfig(home=home, tick_s=0.001), {"local": cloud}) as service:

        def ended() -> list[VmEnded]:
            return [stored.fact for stored in service.journal.facts("j") if isinstance(stored.fact, VmEnded)]

        await service.start()
        await service.admission.submit("j", JobSpec.model_validate(spec()), b"", {})
        while len(cloud.vms) < 2:
            await _more_lists(cloud, 1)
        cloud.is_away = True
        await _more_lists(cloud, 10)
        during = ended()
        taken, _ = cloud.vms.popitem()
        cloud.taken[taken] = "no capacity"
        cloud.is_away = False
        while not ended():
            await _more_lists(cloud, 1)
        return during, ended()


def test_a_list_that_fails_says_nothing(tmp_path: Path) -> None:
    during, after = asyncio.run(_play(tmp_path))
    assert during == []
    assert [(end.reason, end.detail) for end in after] == [(EndReason.PREEMPTED, "no capacity")]


def test_a_cloud_that_throttles_is_asked_ever_less_and_then_as_before() -> None:
    pace = PollInterval(15.0)
    waits: list[float] = []
    for throttled in (True, True, True, True, True, True, False, False, False, False, False, False):
        pace.answered(throttled=throttled)
        waits.append(pace.wait_s)
    assert waits == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0, 150.0, 75.0, 37.5, 18.75, 15.0, 15.0]


class Numbered(Cloud):
    """Has one VM, of which seven attempts were made."""

    def __init__(self) -> None:
        super().__init__()
        self.vms["nobody's"] = ResourceStatus.RUNNING
        self.released: list[tuple[str, int]] = []

    def list(self) -> Sequence[Resource]:
        self.num_lists += 1
        return [
            Resource(vm=vm, attempt=number, id=f"{vm}-{number}", status=status)
            for vm, status in self.vms.items()
            for number in (7, 3)
        ]

    def release(self, vm: str, attempts: int = 1) -> bool:
        self.released.append((vm, attempts))
        return super().release(vm, attempts)


async def _watch(home: Path, local: Cloud, cloud: Cloud, *, cloud_list_s: float) -> None:
    """A manager without a job, until it has asked this machine ten times."""
    config = ServerConfig(home=home, tick_s=0.001, cloud_list_s=cloud_list_s)
    async with _service(config, {"local": local, "aws": cloud}) as service:
        await service.start()
        await _more_lists(local, 10)
        if cloud_list_s < 1.0:
            await _more_lists(cloud, 2)


def test_each_provider_is_asked_at_its_own_interval(tmp_path: Path) -> None:
    cloud = Cloud()
    asyncio.run(_watch(tmp_path, Cloud(), cloud, cloud_list_s=3600.0))
    assert cloud.num_lists == 0


def test_a_vm_that_no_job_has_is_released_with_all_attempts_that_are_listed(tmp_path: Path) -> None:
    cloud = Numbered()
    asyncio.run(_watch(tmp_path, Cloud(), cloud, cloud_list_s=0.001))
    assert cloud.released == [("nobody's", 7)]


class Lagging(Numbered):
    """The VM's release ends while a list that has it is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = threading.Event()
        self.release_is_over: Callable[[], bool] = lambda: True

    def list(self) -> Sequence[Resource]:
        found = super().list()
        if self.num_lists == 2:
            self.listed.set()
            _wait_until(self.release_is_over)
        return found

    def release(self, vm: str, attempts: int = 1) -> bool:
        self.listed.wait(60)
        return super().release(vm, attempts)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_list_asked_for_before_a_release_ended_does_not_repeat_it(tmp_path: Path) -> None:
    cloud = Lagging()

    async def looks() -> None:
        async with _service(ServerConfig(home=tmp_path), {"aws": cloud}) as service:
            watch = service.watches["aws"]
            cloud.release_is_over = lambda: not watch._releasing  # type: ignore
            for _ in range(2):
                await watch.look()
            while watch._releasing:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    asyncio.run(looks())
    assert cloud.num_lists == 2
    assert cloud.released == [("nobody's", 7)]


class Throttling(Cloud):
    def list(self) -> Sequence[Resource]:
        self.num_lists += 1
        raise Throttled("too many calls")


def test_only_a_provider_that_throttles_says_so(tmp_path: Path) -> None:
    async def looks() -> list[bool]:
        away, throttling = Cloud(), Throttling()
        away.is_away = True
        providers = {"aws": throttling, "azure": away, "local": Cloud()}
        async with _service(ServerConfig(home=tmp_path), providers) as service:
            return [await service.watches[name].look() for name in ("aws", "azure", "local")]

    assert asyncio.run(looks()) == [True, False, False]
