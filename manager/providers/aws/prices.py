"""AWS's prices in USD: the spot price history of EC2, and the public price list."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..shared_answers import Cache
from .clients import Clients

_SPOT_S = 300.0
_LIST_S = 24 * 3600.0
_HOURS_A_MONTH = 730.0  # of AWS's own calculator


class _Listed(NamedTuple):
    """A question to the price list: which products, and the unit of the price."""

    service: str
    wanted: tuple[tuple[str, str], ...]
    unit: str
    usage: str = ""  # the end of the usage type, which begins with a region's prefix


class PriceList:
    """Prices, cached for minutes (spot) or a day (list). None: no price. Safe to use from several threads."""

    def __init__(self, clients: Clients, clock: Callable[[], float]) -> None:
        self._clients = clients
        self._clock = clock
        self._spot = Cache(self._ask_history, clock, _SPOT_S)
        self._listed = Cache(self._ask_list, clock, _LIST_S)

    def spot(self, region: str, instance_type: str) -> tuple[float, dict[str, float]]:
        """(when it was asked, {zone: price of an hour})."""
        return self._spot.get((region, instance_type))

    def on_demand(self, region: str, instance_type: str) -> tuple[float, float | None]:
        """(when it was asked, price of an hour)."""
        wanted = {
            "instanceType": instance_type,
            "regionCode": region,
            "operatingSystem": "Linux",
            "preInstalledSw": "NA",
            "tenancy": "Shared",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",  # capacity blocks, bought ahead, are products as well
        }
        return self._listed.get(_Listed("AmazonEC2", tuple(wanted.items()), "Hrs"))

    def disk_hour(self, region: str) -> float | None:
        """The price of a GB, per hour."""
        wanted = {"productFamily": "Storage", "volumeApiName": "gp3", "regionCode": region}
        _, month = self._listed.get(_Listed("AmazonEC2", tuple(wanted.items()), "GB-Mo"))
        return None if month is None else month / _HOURS_A_MONTH

    def address_hour(self, region: str) -> float | None:
        """The price of a public IPv4 address in use, per hour."""
        wanted = {"group": "VPCPublicIPv4Address", "regionCode": region}
        listed = _Listed("AmazonVPC", tuple(wanted.items()), "Hrs", usage="PublicIPv4:InUseAddress")
        return self._listed.get(listed)[1]

    def _ask_history(self, key: tuple[str, str]) -> dict[str, float]:
        """{zone: current price}; the history from now on has the current prices."""
        region, instance_type = key
        with self._clients.translated(f"spot prices of {instance_type} in {region}", region):
            pages = self._clients.ec2(region).get_paginator("describe_spot_price_history")
            found = [
                entry
                for page in pages.paginate(
                    InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], StartTime=self._clock()
                )
                for entry in page["SpotPriceHistory"]
            ]
        found.sort(key=lambda entry: entry["Timestamp"])
        prices = {entry["AvailabilityZone"]: float(entry["SpotPrice"]) for entry in found}
        return {zone: price for zone, price in prices.items() if price > 0.0}

    def _ask_list(self, listed: _Listed) -> float | None:
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in listed.wanted]
        with self._clients.translated(f"price list of {listed.service}"):
            pages = self._clients.pricing().get_paginator("get_products")
            products = [
                json.loads(text)
                for page in pages.paginate(ServiceCode=listed.service, Filters=filters)
                for text in page["PriceList"]
            ]
        used = [product for product in products if _usage_of(product).endswith(listed.usage)]
        return max(_amounts(used, listed.unit), default=None)  # the highest, because it is used as a ceiling


def _usage_of(product: Any) -> str:
    return str(product.get("product", {}).get("attributes", {}).get("usagetype", ""))


def _amounts(products: Sequence[Any], unit: str) -> list[float]:
    """All nonzero prices for that unit; zero means that the product is billed elsewhere."""
    dimensions = [
        dimension
        for product in products
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    ]
    found = [float(d["pricePerUnit"].get("USD", 0)) for d in dimensions if d["unit"] == unit]
    return [amount for amount in found if amount > 0]
