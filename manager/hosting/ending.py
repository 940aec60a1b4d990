"""Deletes everything with a tag; repeats until two lists in a row are empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from ..providers import Partial, Provider, ProviderError, Resource, ResourceStatus
from ..spec.placement import Market, Placement, Price
from ..spec.resources import Resources
from .accounts import CloudAccount

LAG_S = 300.0  # for so long a requested VM may be missing from its cloud's lists
_PAUSE_S = 6.0  # longer than a provider caches its lists
_LAG_PAUSE_S = 30.0
_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A resource that is not gone. `price` None: unknown, or included in its VM's."""

    cloud: str
    resource: Resource
    price: Price | None


def found_in(account: CloudAccount) -> list[Leftover]:
    """The resources of an account, with prices of VMs. Raises `ProviderError`."""
    with closing(account.open()) as provider:
        there = _alive(provider.list())
        return [Leftover(account.cloud, one, _price(provider, one.placement)) for one in there]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long `end_all` waits. Times in seconds; `clock` gives Unix seconds."""

    pause_s: float = _PAUSE_S
    lag_pause_s: float = _LAG_PAUSE_S  # between lists that are empty but may lag
    without_progress_s: float = _PATIENCE_S
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], object] = time.sleep


def end_all(
    accounts: Sequence[CloudAccount],
    patience: Patience,
    tell: Callable[[str], object],
    *,
    not_before: float = 0.0,
) -> list[str]:
    """Delete everything in these accounts; gives up after a long time without progress, and returns what is
    left or could not be asked.

    Two lists in a row must be empty, the second by newly opened providers and after `not_before` (Unix
    seconds).
    """
    were_empty = False
    while True:
        asked_at = patience.clock()
        with ExitStack() as stack:
            providers = [
                (account.cloud, stack.enter_context(closing(account.open()))) for account in accounts
            ]
            left = _end_once(providers)
            if not left and were_empty and asked_at >= not_before:
                return []
            if not left and not were_empty and asked_at < not_before:
                tell(
                    f"nothing is listed; lists may lag, and are asked for {not_before - asked_at:.0f} s more"
                )
            were_empty = not left
            if left and (stuck := _end_listed(providers, left, patience, tell)):
                return stuck
        patience.sleep(patience.pause_s if left or asked_at >= not_before else patience.lag_pause_s)


def _end_listed(
    providers: Sequence[tuple[str, Provider]],
    left: list[str],
    patience: Patience,
    tell: Callable[[str], object],
) -> list[str]:
    """Delete until nothing is listed, or there is no progress; returns what is left."""
    before, moved_at = list[str](), patience.clock()
    while left:
        if left != before:
            before, moved_at = left, patience.clock()
            for text in left:
                tell(text)
        elif patience.clock() - moved_at > patience.without_progress_s:
            return left
        patience.sleep(patience.pause_s)
        left = _end_once(providers)
    return []


def _end_once(providers: Sequence[tuple[str, Provider]]) -> list[str]:
    """Request the deletion of all that is listed; returns its description."""
    return [text for cloud, provider in providers for text in _end_at(cloud, provider)]


def _end_at(cloud: str, provider: Provider) -> list[str]:
    trouble: list[str] = []
    try:
        there = _alive(provider.list())
    except Partial as error:
        there, trouble = _alive(error.found), [f"{cloud}: {error}"]
    except ProviderError as error:
        return [f"{cloud}: {error}"]
    for vm in dict.fromkeys(one.vm for one in there):
        try:
            provider.release(vm)
        except ProviderError as error:
            trouble.append(f"{vm}: {error}")
    return [*(f"{one.kind} {one.id} ({one.vm}): {one.status}" for one in there), *trouble]


def _alive(resources: Sequence[Resource]) -> list[Resource]:
    return [one for one in resources if one.status is not ResourceStatus.GONE]


def _price(provider: Provider, placement: Placement | None) -> Price | None:
    if placement is None or not placement.instance_type:
        return None
    wish = Resources(
        provider=placement.provider,
        max_nodes=1,
        region=placement.region or None,
        zones=[placement.zone] if placement.zone else None,
        instance_type=placement.instance_type,
        use_spot=placement.market is Market.SPOT,
    )
    try:
        return next((offer.price for offer in provider.offers(wish)), None)
    except ProviderError:
        return None  # resources without a price are shown and deleted all the same
