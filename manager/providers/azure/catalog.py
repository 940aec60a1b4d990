"""Checks a job's resources against types, quota and images, and lists offers with their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from azure.mgmt.compute import ComputeManagementClient

from ...spec.placement import STATED, Market, Offer, Placement, Price
from ...spec.resources import Resources
from .. import NotAllowed, Unauthenticated
from ..sizes import Fault, architecture_faults, disk_faults, licence_faults, size_faults
from .images import Image, NoImage, find_image
from .prices import PriceList
from .settings import AzureSettings
from .sizes import Region, Size

_MOST_NAMED = 5


class Catalog:
    """Types, quota and prices in the region of the settings."""

    def __init__(
        self, settings: AzureSettings, client: ComputeManagementClient, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._client = client
        self._region = Region(client, settings.region, clock)
        self._prices = PriceList(settings.prices, settings.ca_file, clock)

    def check(self, resources: Resources) -> list[Fault]:
        """Everything that is wrong with the resources. Raises `ProviderError` if Azure does not answer."""
        faults = list(self._place_faults(resources))
        try:
            sizes = self._region.sizes()
        except (NotAllowed, Unauthenticated) as error:
            return [*faults, ("provider", str(error))]
        if not sizes:
            told = f"azure.region of clouds.yaml is {self._settings.region!r}, where Azure has no types of VM"
            return [*faults, ("region", f"{told}: is it misspelled?")]
        wanted = [(name, sizes.get(name)) for name in resources.types_of("azure")]
        faults += [fault for name, size in wanted for fault in self._type_faults(resources, name, size)]
        if not any(field == "image" for field, _ in faults):
            faults += self._image_faults(resources, [size for _, size in wanted if size is not None])
        if faults:
            return faults
        return list(self._quota_faults(resources, [size for _, size in wanted if size is not None]))

    def offers(self, resources: Resources) -> list[Offer]:
        """Spot before on-demand, then types and zones in the job's order. Without zones, Azure chooses."""
        sizes = self._region.sizes()
        zones = resources.zones_of("azure") or ("",)
        return [
            self._offer(resources, sizes[name], market, zone)
            for market in resources.markets
            for name in resources.types_of("azure")
            if name in sizes and (market is not Market.SPOT or sizes[name].spot)
            for zone in zones
        ]

    def _offer(self, resources: Resources, size: Size, market: Market, zone: str) -> Offer:
        listed = self._prices.of(self._settings.region, size.name)
        placement = Placement(
            provider="azure",
            market=market,
            region=self._settings.region,
            zone=zone,
            instance_type=size.name,
        )
        price = _price(listed, market, resources, self._settings.prices)
        offer = size.offer(placement, price, listed[1].get(Market.ON_DEMAND))
        # Without an identity that may delete it, a VM that ends itself is shut down, and billed.
        return offer.model_copy(update={"ends_itself": self._settings.identity_id is not None})

    def _place_faults(self, resources: Resources) -> Iterator[Fault]:
        region, own = resources.region_of("azure"), self._settings.region
        if region is not None and region != own:
            yield "region", f"{region!r}: the network of clouds.yaml is in {own}, and only there VMs are made"
        image = resources.image_of("azure")
        if image is not None and not image.startswith("/") and len(image.split(":")) != 4:
            yield "image", f"{image!r} is neither publisher:offer:sku:version nor the id of an image"

    def _type_faults(self, resources: Resources, name: str, size: Size | None) -> Iterator[Fault]:
        region = self._settings.region
        if size is None:
            yield "instance_type", f"{name!r} is no type that Azure has in {region}"
            return
        if size.refused is not None:
            yield "instance_type", f"{name}: this subscription may not have it in {region} ({size.refused})"
        elif resources.spot and not size.spot:
            yield "instance_type", f"{name} cannot be had as a spot VM; set use_spot: false, or name another"
        yield from size_faults(size, resources)
        for zone in resources.zones_of("azure"):
            if zone not in size.zones:
                known = ", ".join(sorted(size.zones)[:_MOST_NAMED]) or "none"
                yield "zones", f"{name} is not in zone {zone!r} of {region}; zones that have it: {known}"

    def _image_faults(self, resources: Resources, sizes: list[Size]) -> Iterator[Fault]:
        """Only of marketplace images: the manager may lack the permission to read one that is named by id."""
        name = resources.image_of("azure") or self._settings.image
        if name.startswith("/"):
            return
        try:
            image = find_image(self._client, self._settings.region, name)
        except NoImage as error:
            yield "image", str(error)
            return
        except (NotAllowed, Unauthenticated) as error:
            yield "provider", f"image {name} cannot be looked at: {error}"
            return
        for size in sizes:
            yield from architecture_faults(size, image)
            yield from _generation_faults(size, image)
        yield from disk_faults(resources.disk_gb or self._settings.disk_gb, image)
        yield from licence_faults(image)

    def _quota_faults(self, resources: Resources, sizes: list[Size]) -> Iterator[Fault]:
        """Checks the quota for `min_nodes` VMs of the smallest type: with fewer, the job never trains."""
        market = resources.markets[0]
        size = min(sizes, key=lambda one: one.num_cpus, default=None)
        if size is None:
            return
        quotas = self._region.quotas()
        needed = size.num_cpus * resources.min_nodes
        for name in size.quotas(market):
            quota = quotas.get(name)
            if quota is not None and quota.limit - quota.used < needed:
                yield (
                    "min_nodes",
                    f"{resources.min_nodes} VMs of {size.name} need {needed} of Azure's {quota.title} in"
                    f" {self._settings.region}; {quota.used} of {quota.limit} are in use: ask for more quota",
                )


def _generation_faults(size: Size, image: Image) -> Iterator[Fault]:
    if size.generations and image.generation and image.generation not in size.generations:
        boots = "/".join(sorted(size.generations))
        what = (
            f"{size.name} boots images of generation {boots}, but image {image.name} is of {image.generation}"
        )
        yield "instance_type", what


def _price(
    listed: tuple[float, dict[Market, float]], market: Market, resources: Resources, source: str
) -> Price | None:
    """The price, or None if unknown. A spot VM costs at most its bid, or without one the on-demand price."""
    at, by_market = listed
    hourly, ceiling, bid = by_market.get(market), by_market.get(Market.ON_DEMAND), resources.max_price
    if market is Market.SPOT and bid is not None:
        ceiling = bid if ceiling is None else min(bid, ceiling)
    source = f"{source}, without disk"
    if hourly is None:
        hourly, source = resources.hourly_price, STATED
    if hourly is None or ceiling is None:
        return None
    return Price(hourly=min(hourly, ceiling), ceiling=ceiling, at=at, source=source)
