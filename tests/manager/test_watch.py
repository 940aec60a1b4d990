"""What the lists of a provider's VMs mean to a manager."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from core_script import spec
from in_service import FakeProvider
from makara.manager.config import ServerConfig
from makara.manager.core.facts import VmEnded
from makara.manager.providers import ProviderError, Resource
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.spec.job_spec import JobSpec


class Cloud(FakeProvider):
    """A provider whose list fails while `is_away`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_lists = 0

    def list(self) -> Sequence[Resource]:
        self.num_lists += 1
        if self.is_away:
            raise ProviderError("503")
        return super().list()


async def _more_lists(cloud: Cloud, num: int) -> None:
    wanted = cloud.num_lists + num
    while cloud.num_lists < wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def _play(home: Path) -> tuple[list[VmEnded], list[VmEnded]]:
    """The VMs that ended while the list failed, and once it works again without one of them."""
    config = ServerConfig(home=home, tick_s=0.001)
    journal, tokens, cloud = SqliteJournal(config.journal_path), TokenStore(home / "tokens.sqlite3"), Cloud()
    service = Service(config, journal, tokens, {"local": cloud})

    def ended() -> list[VmEnded]:
        return [stored.fact for stored in journal.facts("j") if isinstance(stored.fact, VmEnded)]

    try:
        await service.start()
        await service.submit("j", JobSpec.model_validate(spec()), b"", {})
        while len(cloud.vms) < 2:
            await _more_lists(cloud, 1)
        cloud.is_away = True
        await _more_lists(cloud, 10)
        during = ended()
        cloud.vms.popitem()
        cloud.is_away = False
        while not ended():
            await _more_lists(cloud, 1)
        return during, ended()
    finally:
        await service.close()
        tokens.close()
        journal.close()


def test_a_list_that_fails_says_nothing(tmp_path: Path) -> None:
    during, after = asyncio.run(_play(tmp_path))
    assert during == []
    assert len(after) == 1
