"""Offers with prices: spot first, then types and zones as the job lists them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ...spec.job_spec import Resources
from ...spec.placement import STATED, Market, Offer, Placement, Price
from .. import NotAllowed
from ..settings import AwsSettings
from ..shared_answers import Cache
from ..sizes import VmType
from .clients import Clients
from .prices import PriceList

NAME = "aws"


class Offers:
    """Safe to use from several threads."""

    def __init__(
        self, settings: AwsSettings, clients: Clients, prices: PriceList, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clients = clients
        self._prices = prices
        self._clock = clock
        self._kinds = Cache(self._look_up, clock, math.inf)

    def of(self, resources: Resources) -> list[Offer]:
        """The offers for a job. Raises `NotAllowed` if the settings lack the region, or AWS the type."""
        region = region_of(resources, self._settings)
        types = {name: self.kind(region, name) for name in resources.types_of(NAME)}
        return [
            types[placement.instance_type].offer(
                placement,
                self._price(placement, resources),
                self._prices.on_demand(placement.region, placement.instance_type)[1],
            )
            for placement in self._placements(resources, region)
        ]

    def kind(self, region: str, instance_type: str) -> VmType:
        """Look up an instance type. Raises `NotAllowed` if it is unknown."""
        return self._kinds.get((region, instance_type))[1]

    def _look_up(self, key: tuple[str, str]) -> VmType:
        region, name = key
        with self._clients.translated(f"instance type {name} in {region}", region):
            found = self._clients.ec2(region).describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
        if not found:
            raise NotAllowed(f"{name} is not known in {region}")
        return _kind(name, found[0])

    def _placements(self, resources: Resources, region: str) -> Iterator[Placement]:
        for market in resources.markets:
            for instance_type in resources.types_of(NAME):
                for zone in resources.zones_of(NAME) or self._settings.regions[region].subnets:
                    yield Placement(
                        provider=NAME, market=market, region=region, zone=zone, instance_type=instance_type
                    )

    def _price(self, placement: Placement, resources: Resources) -> Price | None:
        """The price with disk and address, without traffic. None if AWS states no ceiling."""
        asked, ceiling = self._prices.on_demand(placement.region, placement.instance_type)
        expected, source = ceiling, "price list of AWS"
        if placement.market is Market.SPOT:
            asked, by_zone = self._prices.spot(placement.region, placement.instance_type)
            expected, source = by_zone.get(placement.zone), "spot price history of EC2"
            bid = resources.max_price
            ceiling = bid if ceiling is None else min(ceiling, bid or ceiling)
        if ceiling is None or (expected is None and resources.hourly_price is None):
            return None
        if expected is None:
            stated = resources.hourly_price or 0.0
            ceiling += self._extras(placement.region, resources)[0]
            return Price(hourly=min(stated, ceiling), ceiling=ceiling, at=self._clock(), source=STATED)
        extra, missing = self._extras(placement.region, resources)
        source = f"{source}, without {missing}" if missing else source
        hourly = min(expected, ceiling)  # a VM above the bid is not granted
        return Price(hourly=hourly + extra, ceiling=ceiling + extra, at=asked, source=source)

    def _extras(self, region: str, resources: Resources) -> tuple[float, str]:
        """(hourly cost of disk and address, names of those without a known price)."""
        per_gb = self._prices.disk_hour(region)
        parts = {"disk": None if per_gb is None else per_gb * (resources.disk_gb or self._settings.disk_gb)}
        if self._settings.public_addresses:
            parts["address"] = self._prices.address_hour(region)
        missing = [name for name, price in parts.items() if price is None]
        return sum(price or 0.0 for price in parts.values()), " and ".join(missing)


def region_of(resources: Resources, settings: AwsSettings) -> str:
    """The job's region, or the first of the settings. Raises `NotAllowed`."""
    region = resources.region_of(NAME) or next(iter(settings.regions))
    if region not in settings.regions:
        known = ", ".join(settings.regions)
        raise NotAllowed(f"this manager has no region {region}; clouds.yaml has {known}")
    return region


def _kind(name: str, raw: Any) -> VmType:
    gpus = raw.get("GpuInfo", {}).get("Gpus", [])
    sizes = [gpu["MemoryInfo"]["SizeInMiB"] << 20 for gpu in gpus if "MemoryInfo" in gpu]
    return VmType(
        name=name,
        num_cpus=raw["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=raw["MemoryInfo"]["SizeInMiB"] << 20,
        num_gpus=sum(gpu["Count"] for gpu in gpus),
        gpu_memory_bytes=min(sizes, default=None),
        architectures=tuple(raw.get("ProcessorInfo", {}).get("SupportedArchitectures", [])),
    )
