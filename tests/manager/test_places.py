"""A manager whose settings lack a place where its VMs may be says so, and does nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from core_script import Script, spec
from in_service import Clock, FakeProvider
from makara.manager.config import ServerConfig
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import AttemptFailed, AttemptSucceeded, OffersSeen, StopRequested
from makara.manager.core.facts import RefusalKind
from makara.manager.home import ConfigError
from makara.manager.places import check_places
from makara.manager.providers import Provider
from makara.manager.providers.settings import CloudSettings
from makara.manager.server import run
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.spec.job_spec import parse_spec
from makara.manager.spec.placement import Market, Offer, Placement, Price

WISH = {"provider": "aws", "instance_type": "small", "max_nodes": 1, "hourly_price": 1.0}
TYPES = {"aws": "small", "azure": "Standard_D2s_v5"}
SUBSCRIPTION = "12345678-1234-1234-1234-123456789abc"
ID = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/WORKERS/providers/Microsoft.Compute/virtualMachines/x"


def offer(provider: str = "aws") -> Offer:
    kind = TYPES[provider]
    place = Placement(provider=provider, market=Market.SPOT, region="r", zone="a", instance_type=kind)
    return Offer(placement=place, price=Price(hourly=1.0, ceiling=1.0, at=0.0, source="a test"))


def rented(provider: str = "aws", id: str = "") -> Script:
    """A job with a VM there, whose id is known if one is given."""
    script = Script(releasing=False)
    script.submit(resources={**WISH, "provider": provider, "instance_type": TYPES[provider]})
    script.event(OffersSeen(now=script.now, offers=(offer(provider),)))
    script.wait()
    if id:
        vm = script.last(RequestVm).vm
        script.event(AttemptSucceeded(now=script.now, vm=vm, number=1, id=id))
    return script


def aws(*regions: str) -> CloudSettings:
    region = {"subnets": {"a": "subnet-1"}, "security_groups": ["sg-1"]}
    return CloudSettings.model_validate({"aws": {"regions": dict.fromkeys(regions, region)}})


def azure(**changes: str) -> CloudSettings:
    network = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network"
    section = {
        "subscription_id": SUBSCRIPTION,
        "resource_group": "workers",
        "region": "westeurope",
        "subnet_id": f"{network}/virtualNetworks/v/subnets/s",
    }
    return CloudSettings.model_validate({"azure": {**section, **changes}})


@pytest.mark.parametrize(
    ("settings", "script", "told"),
    [
        (CloudSettings(), rented(), "aws is missing"),
        (aws("other"), rented(), "aws.regions.r is missing"),
        (CloudSettings(), rented("azure"), "azure is missing"),
        (azure(resource_group="others"), rented("azure", ID), "azure.resource_group is no longer WORKERS"),
        (
            azure(subscription_id="0" * 36),
            rented("azure", ID),
            "azure.subscription_id is no longer " + SUBSCRIPTION,
        ),
    ],
)
def test_settings_without_a_place_where_a_vm_may_be_are_refused_by_field(
    settings: CloudSettings, script: Script, told: str
) -> None:
    with pytest.raises(ConfigError, match=r"clouds\.yaml: ") as raised:
        check_places(settings, [script.state])
    assert told in str(raised.value)
    assert script.last(RequestVm).vm in str(raised.value)


def test_a_vm_of_a_job_that_has_ended_counts_until_it_is_gone() -> None:
    script = rented()
    script.event(StopRequested(now=script.now))
    assert script.state.ended is not None
    with pytest.raises(ConfigError, match=r"aws\.regions\.r"):
        check_places(aws("other"), [script.state])


@pytest.mark.parametrize(
    ("settings", "script"),
    [(aws("other", "r"), rented()), (azure(), rented("azure")), (azure(region="north"), rented("azure", ID))],
)
def test_settings_that_reach_every_vm_are_taken(settings: CloudSettings, script: Script) -> None:
    check_places(settings, [script.state])


def test_a_place_of_which_nothing_exists_may_be_taken_out() -> None:
    script = rented()
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    kind = RefusalKind.NO_CAPACITY
    script.event(AttemptFailed(now=script.now, vm=attempt.vm, number=1, kind=kind, error="none"))
    check_places(CloudSettings(), [script.state])


class Life:
    """A manager's service on this home, with these providers."""

    def __init__(self, home: Path, providers: Mapping[str, Provider], **changes: Any) -> None:
        self.journal = SqliteJournal(home / "journal.sqlite3")
        self.tokens = TokenStore(home / "tokens.sqlite3")
        config = ServerConfig(home=home, tick_s=3600.0, rest_factor=0.0)
        self.service = Service(config, self.journal, self.tokens, providers, clock=Clock(), **changes)

    async def __aenter__(self) -> Service:
        await self.service.start()
        return self.service

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()
        self.tokens.close()
        self.journal.close()


async def _rent(home: Path) -> None:
    """A manager that dies with a VM at aws."""
    cloud = FakeProvider()
    async with Life(home, {"aws": cloud}, clouds=aws("r")) as service:
        await service.admission.submit("j", parse_spec(spec(resources=WISH)), b"", {})
        await service.handle("j", OffersSeen(now=service.clock(), offers=(offer(),)))
        service.tick()
        async with asyncio.timeout(60):
            while not cloud.vms:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def test_a_manager_that_cannot_reach_its_vms_ends_and_does_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        await _rent(tmp_path)
        life = Life(tmp_path, {}, clouds=aws("other"))
        before = len(life.journal.facts("j"))
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, pytest.raises(ConfigError, match=r"aws\.regions\.r is missing"):
            await run(life.service, listener)
        assert len(life.journal.facts("j")) == before
        life.tokens.close()
        life.journal.close()

    asyncio.run(play())


def test_a_job_that_names_a_cloud_without_a_section_has_that_told_and_the_manager_goes_on(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        async with Life(tmp_path, {}, clouds=CloudSettings()) as service:
            await service.admission.submit("j", parse_spec(spec(resources=WISH)), b"", {})
            async with asyncio.timeout(60):
                while not service.effects.trouble.get("j"):
                    assert service._failure is None
                    await asyncio.sleep(0.005)
            (told,) = service.effects.trouble["j"].values()
            assert "clouds.yaml has no section aws" in told

    asyncio.run(play())


def test_a_release_at_a_cloud_without_a_section_stays_to_be_done(tmp_path: Path) -> None:
    async def play() -> None:
        await _rent(tmp_path)
        async with Life(tmp_path, {}) as service:
            vm = service.jobs["j"].state.live_vms[0].vm
            await service.stop("j")
            async with asyncio.timeout(60):
                while not any("no section aws" in it for it in service.effects.trouble.get("j", {}).values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert vm in service.jobs["j"].state.leaving
        cloud = FakeProvider()
        async with Life(tmp_path, {"aws": cloud}) as service:
            async with asyncio.timeout(60):
                while service.jobs["j"].state.leaving:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    asyncio.run(play())
