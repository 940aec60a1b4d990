"""The types of VM of a region, and an account's quota.

From `learn.microsoft.com/rest/api/compute/resource-skus/list` and `.../usage/list`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from azure.core.exceptions import AzureError
from azure.mgmt.compute import ComputeManagementClient

from ...spec.placement import Market
from . import errors

_KEPT_S = 3600.0
_SPOT_QUOTA = "lowPriorityCores"  # of all spot VMs together
_TOTAL_QUOTA = "cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A type of VM in one region, as this account may use it."""

    name: str
    family: str
    num_cpus: int
    memory_bytes: int
    num_gpus: int
    spot: bool
    architecture: str  # x64, Arm64; empty: not known
    generations: frozenset[str]  # of images that it boots (hypervisor V1, V2); empty: unknown
    zones: frozenset[str]
    refused: str | None  # why the account may not use it in this region

    def quotas(self, market: Market) -> tuple[str, ...]:
        return (_SPOT_QUOTA,) if market is Market.SPOT else (self.family, _TOTAL_QUOTA)


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit on vCPUs, and its use."""

    title: str
    limit: int
    used: int


class Region:
    """One region for one account; its types are looked up at most once an hour."""

    def __init__(self, client: ComputeManagementClient, region: str) -> None:
        self._client = client
        self._region = region
        self._lock = threading.Lock()
        self._sizes: dict[str, Size] = {}
        self._read_at = 0.0

    def sizes(self) -> dict[str, Size]:
        """{name: size}. Raises `ProviderError`."""
        with self._lock:
            if not self._sizes or time.monotonic() - self._read_at > _KEPT_S:
                wanted = f"location eq '{self._region}'"
                try:
                    found = [sku.as_dict() for sku in self._client.resource_skus.list(filter=wanted)]
                except AzureError as error:
                    raise errors.of_request(error) from error
                sizes = [_size(sku) for sku in found if sku.get("resourceType") == "virtualMachines"]
                self._sizes = {size.name: size for size in sizes}
                self._read_at = time.monotonic()
            return self._sizes

    def quotas(self) -> dict[str, Quota]:
        """{Azure's name: quota}. Raises `ProviderError`."""
        try:
            found = [usage.as_dict() for usage in self._client.usage.list(self._region)]
        except AzureError as error:
            raise errors.of_request(error) from error
        return {
            usage["name"]["value"]: Quota(
                str(usage["name"].get("localizedValue") or usage["name"]["value"]),
                int(usage["limit"]),
                int(usage["currentValue"]),
            )
            for usage in found
        }


def _size(sku: dict[str, Any]) -> Size:
    abilities = {one["name"]: str(one["value"]) for one in sku.get("capabilities") or []}
    places = sku.get("locationInfo") or []
    zones = {zone for place in places for zone in place.get("zones") or []}
    refused = None
    for restriction in sku.get("restrictions") or []:
        if restriction.get("type") == "Zone":
            zones -= set((restriction.get("restrictionInfo") or {}).get("zones") or [])
        else:
            refused = str(restriction.get("reasonCode") or "restricted")
    return Size(
        name=str(sku["name"]),
        family=str(sku.get("family") or ""),
        num_cpus=int(abilities.get("vCPUsAvailable") or abilities.get("vCPUs") or 0),
        memory_bytes=int(float(abilities.get("MemoryGB") or 0) * 2**30),
        num_gpus=int(abilities.get("GPUs") or 0),
        spot=abilities.get("LowPriorityCapable") == "True",
        architecture=abilities.get("CpuArchitectureType", ""),
        generations=frozenset(filter(None, abilities.get("HyperVGenerations", "").split(","))),
        zones=frozenset(zones),
        refused=refused,
    )
