"""Checks of a job that rents VMs, before it is accepted and anything is rented."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from ..core.cost import price_of
from ..providers import NotAllowed, Provider, ProviderError, Unauthenticated
from ..service.service import Service
from ..spec.job_spec import JobSpec, JobSpecError, Resources
from ..spec.placement import Offer, Placement, Price
from ..threads import CallKind

Fault = tuple[str, str]  # field of `resources`, message
Priced = tuple[Price, Placement]
_ROUNDING = 1e-9
T = TypeVar("T")


class MachineType(BaseModel):
    """A type of VM that a job may get, and the memory of each of its workers there (None: unknown)."""

    instance_type: str
    worker_bytes: int | None


class CloudAway(Exception):
    """A cloud does not answer now; the message names it."""


async def check_renting(service: Service, spec: JobSpec, spent: float = 0.0) -> tuple[Offer, ...]:
    """The offers of the job's clouds; empty if it rents nothing. Only checks, and rents nothing.

    `spent`: USD of the job's budget already spent. Raises `JobSpecError` with every fault, `CloudAway`.
    """
    resources, now = spec.resources, service.clock()
    if not resources.clouds:
        return ()
    faults = [("provider", why) for why in await _address_faults(service)]
    answers = await asyncio.gather(*(_answer(service, name, resources) for name in resources.clouds))
    faults += [fault for found, _ in answers for fault in found]
    offers = [offer for _, found in answers for offer in found]
    prices = [(price, offer.placement) for offer in offers if (price := price_of(resources, offer, now))]
    if not faults:
        faults += _without_price(resources, prices)
    if not faults:
        faults += _cap_faults(resources, prices, service.timing.least_paid_s, spent)
    if faults:
        raise JobSpecError([(f"resources.{field}", message) for field, message in faults])
    return tuple(offers)


# ---- the manager's address ---------------------------------------------------------------------------------


async def _address_faults(service: Service) -> list[str]:
    """Reasons why a VM elsewhere cannot connect to this manager, as far as they are known here."""
    url = service.manager_url
    parts = urlsplit(url)
    why = "plain HTTP" if parts.scheme != "https" else await _unusable(service, parts.hostname or "")
    told = f"VMs of clouds cannot use this manager's address {url}: {why}; start it with --public-url https://..."
    return [told] if why else []


async def _unusable(service: Service, host: str) -> str:
    """What is wrong with that name or address; empty if nothing is."""
    try:
        found = await _bounded(service, "names", partial(socket.getaddrinfo, host, None))
    except OSError as error:  # includes time-outs
        return f"{host} cannot be resolved ({error or 'no answer'})"
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if all(address.is_loopback for address in addresses):
        return f"{addresses[0]} is a loopback address"
    useless = all(it.is_loopback or it.is_unspecified or it.is_link_local for it in addresses)
    return f"{addresses[0]} is no address that other networks know" if useless else ""


# ---- the clouds --------------------------------------------------------------------------------------------


async def _answer(
    service: Service, name: str, resources: Resources
) -> tuple[Sequence[Fault], Sequence[Offer]]:
    """(faults of the request, offers) of one cloud. Raises `CloudAway`."""
    try:
        return await _bounded(service, name, partial(_ask, service.providers[name], resources))
    except (NotAllowed, Unauthenticated) as error:
        return [("provider", f"{name}: {error}")], []
    except ProviderError as error:
        raise CloudAway(f"resources.provider: {name} cannot be asked now: {error}") from error
    except TimeoutError as error:
        waited = f"no answer for {service.config.cloud_check_s:g} s"
        raise CloudAway(f"resources.provider: {name} cannot be asked now: {waited}") from error


def _ask(provider: Provider, resources: Resources) -> tuple[Sequence[Fault], Sequence[Offer]]:
    faults = provider.check(resources)
    return (faults, []) if faults else ([], provider.offers(resources))


async def _bounded(service: Service, owner: str, call: partial[T]) -> T:
    """Run `call` in a thread, for as long as a submission waits. Raises `TimeoutError`."""
    asked = service.threads.run(CallKind.CHECK_WISH, call, owner=owner)
    return await asyncio.wait_for(asked, service.config.cloud_check_s)


# ---- prices and caps ---------------------------------------------------------------------------------------


def _without_price(resources: Resources, prices: Sequence[Priced]) -> Iterator[Fault]:
    """Faults of types for which neither the cloud nor the user states a price."""
    priced = {place.instance_type for _, place in prices}
    for cloud in resources.clouds:
        for name in resources.types_of(cloud):
            if name not in priced:
                what = f"no price of {name} at {cloud} is known; state one, or leave the type out"
                yield "hourly_price", what


def _cap_faults(
    resources: Resources, prices: Sequence[Priced], needed_s: float, spent: float
) -> Iterator[Fault]:
    """Faults of caps that do not pay for `min_nodes` of the cheapest VM."""
    price, place = min(prices, key=lambda found: found[0].ceiling)
    hourly = resources.min_nodes * price.ceiling
    what = f"min_nodes ({resources.min_nodes}) of {place.instance_type} may cost {hourly:.4g} USD an hour"
    most, budget = resources.max_hourly_cost, resources.budget
    if most is not None and hourly > most + _ROUNDING:
        yield "max_hourly_cost", f"{most:g}, but {what}"
    least = hourly * needed_s / 3600.0
    if budget is not None and least > budget - spent + _ROUNDING:
        gone = f" less {spent:.4g} that are spent" if spent else ""
        how = f"{least:.4g} USD for {needed_s / 60.0:.0f} minutes, and for less none is rented"
        yield "budget", f"{budget:g}{gone}, but {what}: {how}"


# ---- what a worker gets ------------------------------------------------------------------------------------


def machines_of(resources: Resources, offers: Sequence[Offer]) -> list[MachineType]:
    """The offered types, each once."""
    by_type = {offer.placement.instance_type: offer for offer in offers}
    return [
        MachineType(instance_type=name, worker_bytes=offer.worker_bytes(resources.workers_per_node))
        for name, offer in by_type.items()
    ]
