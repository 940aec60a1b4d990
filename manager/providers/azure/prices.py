"""Prices of VMs from Azure's public list (`learn.microsoft.com/rest/api/cost-management/retail-prices`).

The list needs no account and ignores an account's agreements. Disk and traffic are not included.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import httpx

from ...spec.placement import Market
from .. import NotAllowed, ProviderError, Throttled
from ..shared_answers import Cache

_TIMEOUT_S = 30.0
_KEPT_S = 3600.0
_MOST_PAGES = 50


class PriceList:
    """Prices, each looked up at most once an hour."""

    def __init__(self, address: str, ca_file: str | None, clock: Callable[[], float]) -> None:
        self._address = address
        self._ca_file = ca_file
        self._kept = Cache(self._ask, clock, _KEPT_S)

    def of(self, region: str, size: str) -> tuple[float, dict[Market, float]]:
        """(when it was asked, {market: USD an hour of a Linux VM}), for markets with a price. Raises
        `ProviderError` if the list is unavailable."""
        at, hourly = self._kept.get((region, size))
        if not hourly:  # this may be temporary
            self._kept.forget((region, size))
        return at, hourly

    def _ask(self, key: tuple[str, str]) -> dict[Market, float]:
        hourly: dict[Market, float] = {}
        for item in self._items(*key):
            market, price = _market_of(item), float(item["unitPrice"])
            if market is not None and price > 0.0:  # zero stands where no price has been set yet
                hourly[market] = max(price, hourly.get(market, 0.0))  # used as a ceiling
        return hourly

    def _items(self, region: str, size: str) -> list[dict[str, Any]]:
        wanted = {
            "serviceName": "Virtual Machines",
            "armRegionName": region,
            "armSkuName": size,
            "priceType": "Consumption",
        }
        query = " and ".join(f"{name} eq '{_quoted(value)}'" for name, value in wanted.items())
        items: list[dict[str, Any]] = []
        with httpx.Client(verify=trusted(self._ca_file), timeout=_TIMEOUT_S) as client:
            page = _page(client, self._address, {"$filter": query})
            for _ in range(_MOST_PAGES):
                items += page["Items"]
                if not page.get("NextPageLink"):
                    return items
                page = _page(client, page["NextPageLink"])
        raise ProviderError(f"{self._address} has more than {_MOST_PAGES} pages about {size}")


def trusted(ca_file: str | None) -> ssl.SSLContext:
    """The trusted certificates: those of `certifi`, or only those of a file."""
    return httpx.create_ssl_context() if ca_file is None else ssl.create_default_context(cafile=ca_file)


def _page(client: httpx.Client, address: str, parameters: dict[str, str] | None = None) -> dict[str, Any]:
    try:
        answer = client.get(address, params=parameters)
    except httpx.HTTPError as error:
        raise ProviderError(f"Azure's prices cannot be had from {address}: {error}") from error
    if answer.status_code == 429:
        raise Throttled(f"{address} is asked too often")
    if answer.status_code != 200:
        raise ProviderError(f"Azure's prices cannot be had from {address}: HTTP {answer.status_code}")
    try:
        found = answer.json()
    except ValueError as error:
        raise ProviderError(f"Azure's prices cannot be had from {address}: no JSON came") from error
    if not isinstance(found, dict) or not isinstance(found.get("Items"), list):
        raise ProviderError(f"Azure's prices cannot be had from {address}: no list of prices came")
    return found


def _market_of(item: dict[str, Any]) -> Market | None:
    """The market of a price; None for other products: Windows, reservations, low priority (Batch only)."""
    meter = str(item.get("skuName", ""))
    hourly = item.get("unitOfMeasure") == "1 Hour" and item.get("currencyCode", "USD") == "USD"
    if not hourly or "Windows" in str(item.get("productName", "")) or meter.endswith("Low Priority"):
        return None
    return Market.SPOT if meter.endswith(" Spot") else Market.ON_DEMAND


def _quoted(value: str) -> str:
    if not value.isprintable() or len(value) > 100:
        raise NotAllowed(f"{value[:40]!r} is no name of Azure's")
    return value.replace("'", "''")
