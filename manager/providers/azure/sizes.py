"""The types of VM of a region, and an account's quota.

From `learn.microsoft.com/rest/api/compute/resource-skus/list` and `.../usage/list`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from azure.core.exceptions import AzureError
from azure.mgmt.compute import ComputeManagementClient

from ...spec.placement import Market
from ..shared_answers import Cache
from ..sizes import VmType
from . import errors

_KEPT_S = 3600.0
_SPOT_QUOTA = "lowPriorityCores"  # of all spot VMs together
_TOTAL_QUOTA = "cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(VmType):
    """A type of VM in one region, as this account may use it. Azure's list does not give
    the memory of GPUs."""

    family: str
    spot: bool
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

    def __init__(self, client: ComputeManagementClient, region: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._region = region
        self._sizes = Cache(self._ask_sizes, clock, _KEPT_S)

    def sizes(self) -> dict[str, Size]:
        """{name: size}. Raises `ProviderError`."""
        _, found = self._sizes.get(self._region)
        if not found:  # this may be temporary
            self._sizes.forget(self._region)
        return found

    def _ask_sizes(self, region: str) -> dict[str, Size]:
        try:
            found = [
                sku.as_dict() for sku in self._client.resource_skus.list(filter=f"location eq '{region}'")
            ]
        except AzureError as error:
            raise errors.of_request(error) from error
        sizes = [_size(sku) for sku in found if sku.get("resourceType") == "virtualMachines"]
        return {size.name: size for size in sizes}

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
        architectures=_listed(abilities, "CpuArchitectureType"),  # x64, Arm64
        generations=frozenset(_listed(abilities, "HyperVGenerations")),
        zones=frozenset(zones),
        refused=refused,
    )


def _listed(abilities: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, abilities.get(name, "").split(",")))
