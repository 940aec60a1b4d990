"""What clouds offer reaches the jobs that rent, whatever one of the clouds does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from core_script import Script, spec
from in_service import Clock, FakeProvider
from makara.manager.config import ServerConfig
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import OffersSeen
from makara.manager.core.facts import StopOrdered
from makara.manager.providers import ProviderError
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.service.vms import offers
from makara.manager.spec.job_spec import Resources, parse_spec
from makara.manager.spec.placement import Market, Offer, Placement, Price

WISH = {
    "provider": ["aws", "azure"],
    "instance_type": ["small", "Standard_D2s_v5"],
    "max_nodes": 1,
    "hourly_price": 1.0,
}
KINDS = {"aws": "small", "azure": "Standard_D2s_v5"}


def offer(provider: str, hourly: float) -> Offer:
    kind = KINDS[provider]
    place = Placement(provider=provider, market=Market.SPOT, region="r", zone="a", instance_type=kind)
    return Offer(placement=place, price=Price(hourly=hourly, ceiling=hourly, at=0.0, source="a test"))


class Cloud(FakeProvider):
    """Offers one place, fails while `error` is set, and hangs while `hangs` is."""

    def __init__(self, provider: str) -> None:
        super().__init__()
        self.provider = provider
        self.error: ProviderError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def offers(self, resources: Resources) -> Sequence[Offer]:
        assert self.answers.wait(60)
        if self.error is not None:
            raise self.error
        kind = KINDS[self.provider]
        place = Placement(
            provider=self.provider, market=Market.SPOT, region="r", zone="a", instance_type=kind
        )
        return [Offer(placement=place, price=Price(hourly=1.0, ceiling=1.0, at=0.0, source="a test"))]


class Life:
    """A manager with both clouds and a job that may rent from either; its clock stands."""

    def __init__(self, home: Path) -> None:
        self.clouds = {name: Cloud(name) for name in KINDS}
        self.clock = Clock()
        self._journal = SqliteJournal(home / "journal.sqlite3")
        self._tokens = TokenStore(home / "tokens.sqlite3")
        config = ServerConfig(home=home, tick_s=3600.0, rest_factor=0.0)
        self.service = Service(config, self._journal, self._tokens, self.clouds, clock=self.clock)

    async def __aenter__(self) -> Life:
        await self.service.start()
        await self.service.admission.submit("j", parse_spec(spec(resources=WISH)), b"", {})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()
        self._tokens.close()
        self._journal.close()

    def told(self) -> list[str]:
        """The providers of the places that the job was told of."""
        return [offer.placement.provider for offer in self.service.jobs["j"].observations.offers or ()]

    async def until_told(self, *providers: str) -> None:
        async with asyncio.timeout(60):
            while self.told() != list(providers):
                assert self.service._failure is None
                await asyncio.sleep(0.005)

    async def until_answered(self) -> None:
        """By azure, while aws was asked."""
        known = self.service._offers
        async with asyncio.timeout(60):
            while not (("j", "azure") in known._known and ("j", "aws") in known._asked_at):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def trouble(self) -> list[str]:
        return [
            text for name, text in self.service.effects.trouble["j"].items() if name.startswith("offers/")
        ]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "_LOOK_S", 0.01)


def test_a_cloud_that_fails_from_the_start_keeps_no_job_from_the_other(tmp_path: Path) -> None:
    async def play() -> None:
        life = Life(tmp_path)
        life.clouds["aws"].error = ProviderError("503")
        async with life:
            await life.until_told("azure")
            assert life.trouble() == ["prices of aws: 503"]
            life.clouds["aws"].error = None
            life.clock.now += 16  # a cloud that never answered is asked again soon
            await life.until_told("aws", "azure")  # in the order in which the job wants them
            assert life.trouble() == []

    asyncio.run(play())


def test_a_cloud_that_hangs_keeps_no_job_from_the_other(tmp_path: Path) -> None:
    async def play() -> None:
        life = Life(tmp_path)
        life.clouds["aws"].answers.clear()
        try:
            async with life:
                await life.until_answered()
                await asyncio.sleep(0.2)
                assert life.told() == [], "it is waited for, since the job wants it first"
                life.clock.now += 31
                await life.until_told("azure")
        finally:
            life.clouds["aws"].answers.set()

    asyncio.run(play())


def test_an_answer_that_comes_after_a_job_was_stopped_and_resumed_is_told(tmp_path: Path) -> None:
    """Found by reading: the manager ended, for when the first question was asked was forgotten."""

    async def play() -> None:
        life = Life(tmp_path)
        life.clouds["aws"].answers.clear()
        try:
            async with life:
                await life.until_answered()
                life.service._offers._since.clear()
                life.service._offers._news.add("j")
                async with asyncio.timeout(60):
                    while not life.service._offers._since:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                life.clock.now += 31
                await life.until_told("azure")
        finally:
            life.clouds["aws"].answers.set()

    asyncio.run(play())


def test_of_a_cloud_that_fails_later_what_it_offered_before_holds(tmp_path: Path) -> None:
    async def play() -> None:
        async with Life(tmp_path) as life:
            await life.until_told("aws", "azure")
            life.clouds["azure"].error = ProviderError("503")
            life.clock.now += 301
            async with asyncio.timeout(60):
                while life.trouble() != ["prices of azure: 503"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert life.told() == ["aws", "azure"]

    asyncio.run(play())


def test_nothing_final_is_concluded_while_a_cloud_has_not_answered() -> None:
    """Found: with a budget that the first cloud to answer was too dear for, the job was stopped."""
    script = Script(releasing=False)
    script.submit(resources={**WISH, "budget": 5.0, "hourly_price": 100.0})
    dear, cheap = (offer(provider, hourly) for provider, hourly in (("aws", 50.0), ("azure", 0.5)))
    script.event(OffersSeen(now=script.now, offers=(dear,), unanswered=("azure",)))
    script.wait()
    assert script.count(StopOrdered) == 0
    assert script.observations.why_no_vm == "prices of azure are not known yet"
    script.event(OffersSeen(now=script.now, offers=(dear, cheap)))
    script.wait()
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    assert attempt.placement.provider == "azure"
