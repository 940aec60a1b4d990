"""The account in Azure that the conformance suite is run against."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from azure.core.credentials import AccessToken
from azure_account import GROUP, MACHINES, SUBSCRIPTION, Failing
from azure_catalog import REGION
from azure_stand_in import TOKEN, AzureStandIn
from makara.manager.providers.azure.provider import AzureProvider
from makara.manager.providers.azure.request import VM_TAG
from makara.manager.providers.azure.settings import AzureSettings
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Attempt, Market, Placement
from makara.protocol.messages import BootConfig
from provider_troubles import CONSOLE, Trouble

LATE_S = 600.0
_NETWORK = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/net/providers/Microsoft.Network"


class StaticCredential:
    """Signs in as whoever holds the stand-in's token."""

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken(TOKEN, int(time.time()) + 3600)


class AzureCloud:
    """A stand-in, and providers that use it."""

    def __init__(self, folder: Path, host: str) -> None:
        self.stand_in = AzureStandIn(folder, host=host)
        self.account = self.stand_in.account
        self._providers: list[AzureProvider] = []
        self.passed_s = 0.0

    def settings(self, **changes: object) -> AzureSettings:
        return AzureSettings.model_validate(
            {
                "subscription_id": SUBSCRIPTION,
                "resource_group": GROUP,
                "region": REGION,
                "subnet_id": f"{_NETWORK}/virtualNetworks/workers/subnets/workers",
                "resource_manager": self.stand_in.address,
                "prices": f"{self.stand_in.address}/prices",
                "ca_file": str(self.stand_in.ca_file),
                **changes,
            }
        )

    def provider(
        self,
        manager: str = "first",
        *,
        poll_s: float = 0.001,
        patience_s: float = 5.0,
        list_s: float = 0.0,
        **changes: object,
    ) -> AzureProvider:
        made = AzureProvider(
            self.settings(**changes),
            manager,
            user_data,
            credential=StaticCredential(),
            poll_s=poll_s,
            patience_s=patience_s,
            list_s=list_s,
            clock=lambda: time.time() + self.passed_s,
        )
        self._providers.append(made)
        return made

    def attempt(
        self,
        vm: str = "gpt-vm0",
        number: int = 1,
        *,
        market: Market = Market.SPOT,
        max_price: float | None = None,
        zone: str = "",
        instance_type: str = "Standard_D4s_v5",
    ) -> Attempt:
        placement = Placement(
            provider="azure", market=market, region=REGION, zone=zone, instance_type=instance_type
        )
        return Attempt(vm=vm, number=number, placement=placement, max_price=max_price)

    def resources(self, **changes: object) -> Resources:
        wish = {"provider": "azure", "instance_type": "Standard_D4s_v5", "max_nodes": 2, **changes}
        return Resources.model_validate(wish)

    def names(self, kind: str = MACHINES) -> list[str]:
        return [name for found, name in self.account.resources if found == kind]

    def close(self) -> None:
        self.account.settle()
        for provider in self._providers:
            provider.close()
        self.stand_in.close()


class AzureStand:
    """That cloud, as the conformance suite sees it."""

    troubles = frozenset(
        {
            Trouble.NO_CAPACITY,
            Trouble.QUOTA,
            Trouble.REFUSED,
            Trouble.THROTTLED,
            Trouble.UNREACHABLE,
            Trouble.LATE_LISTS,
            Trouble.LOST_ANSWER,
            Trouble.LEFTOVERS,
        }
    )
    counts_attempts = True
    remembers_ends = False

    def __init__(self, cloud: AzureCloud) -> None:
        self._cloud = cloud
        cloud.stand_in.console = CONSOLE

    def provider(self, manager: str = "first") -> AzureProvider:
        return self._cloud.provider(manager, list_s=5.0)

    def attempt(self, vm: str, number: int = 1) -> Attempt:
        return self._cloud.attempt(vm, number)

    def resources(self, **changes: object) -> Resources:
        return self._cloud.resources(**changes)

    def trouble(self, trouble: Trouble) -> None:
        self._set(trouble, on=True)

    def relieve(self, trouble: Trouble) -> None:
        self._set(trouble, on=False)

    def end(self, vm: str) -> None:
        with self._cloud.account.lock:
            (name,) = (name for name in self._cloud.names() if name.startswith(f"{vm}-"))
            self._cloud.account.evict(name)

    def wait(self) -> None:
        with self._cloud.account.lock:
            self._cloud.account.settle()
            self._cloud.passed_s += LATE_S

    def billed(self) -> list[str]:
        with self._cloud.account.lock:
            return [body["tags"].get(VM_TAG, "") for body in self._cloud.account.resources.values()]

    def _set(self, trouble: Trouble, *, on: bool) -> None:
        stand_in, account = self._cloud.stand_in, self._cloud.account
        failing = {
            Trouble.NO_CAPACITY: Failing("ZonalAllocationFailed"),
            Trouble.REFUSED: Failing("InvalidParameter", status=400),
            Trouble.LEFTOVERS: Failing("AllocationFailed"),
        }
        if trouble in failing:
            account.failing = failing[trouble] if on else None
            account.fails_once = trouble is Trouble.LEFTOVERS
            account.reserved = 2 if on and trouble is Trouble.LEFTOVERS else 0
        elif trouble is Trouble.QUOTA:
            account.quotas["lowPriorityCores"] = (50, 50) if on else (0, 50)
        elif trouble is Trouble.THROTTLED:
            stand_in.throttled = on
        elif trouble is Trouble.UNREACHABLE:
            stand_in.unreachable = on
        elif trouble is Trouble.LATE_LISTS:
            account.lists_late = on
        else:
            stand_in.loses_answers_of = {"PUT"} if on else set()


@contextmanager
def azure_stand(folder: Path) -> Iterator[AzureStand]:
    with azure_cloud(folder) as cloud:
        yield AzureStand(cloud)


def user_data(attempt: Attempt, boot: BootConfig) -> bytes:
    return f"#cloud-config\n# {attempt.name}\n".encode()


@contextmanager
def azure_cloud(folder: Path, host: str = "127.0.0.1") -> Iterator[AzureCloud]:
    """`host`: the address of this machine that it listens on."""
    cloud = AzureCloud(folder, host)
    try:
        yield cloud
    finally:
        cloud.close()
