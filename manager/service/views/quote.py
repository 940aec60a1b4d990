"""Quotes: what a job would rent, and what that would cost, before it is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from ...core.cost import price_of
from ...core.offer_order import in_order
from ...spec.job_spec import Resources
from ...spec.placement import Market, Offer, Price
from .costs import PricedPlace

_ROUNDING = 1e-9


class QuotedOffer(PricedPlace):
    """A place where VMs can be requested, and what a VM has there (None: unknown)."""

    num_cpus: int | None
    memory_bytes: int | None
    num_gpus: int
    gpu_memory_bytes: int | None


class Quote(BaseModel):
    """`offers`: those with a price, in the order in which they are tried. `num_vms`: how many VMs of the
    first offer the job may have, by `max_nodes` and `max_hourly_cost`; `hourly`: their expected cost.
    `hourly_at_most`: the most that the job may cost with any offers."""

    offers: list[QuotedOffer]
    order: str  # in which instance types are tried: as `listed`, or by `price` over speed
    num_vms: int
    max_nodes: int
    on_demand_nodes: int
    on_demand_after_s: float
    hourly: float
    hourly_at_most: float
    max_hourly_cost: float | None
    budget: float | None


def quote_of(resources: Resources, offers: Sequence[Offer], now: float) -> Quote | None:
    """The quote; None for a job that rents nothing."""
    ordered = in_order(resources, offers, now)
    priced = [(offer, price) for offer in ordered if (price := price_of(resources, offer, now)) is not None]
    if not resources.clouds or not priced:
        return None
    most, first = resources.max_hourly_cost, priced[0][1]
    num_vms = resources.max_nodes
    if most is not None and first.ceiling:
        num_vms = min(num_vms, int((most + _ROUNDING) / first.ceiling))
    at_most = _ceiling(resources, priced)
    return Quote(
        offers=[_quoted(offer, price) for offer, price in priced],
        order=resources.order,
        num_vms=num_vms,
        max_nodes=resources.max_nodes,
        on_demand_nodes=resources.on_demand_nodes if resources.spot else resources.max_nodes,
        on_demand_after_s=resources.on_demand_after_s if resources.spot else 0.0,
        hourly=num_vms * first.hourly,
        hourly_at_most=at_most if most is None else min(at_most, most),
        max_hourly_cost=most,
        budget=resources.budget,
    )


def _ceiling(resources: Resources, priced: Sequence[tuple[Offer, Price]]) -> float:
    """The ceiling of `max_nodes` VMs, each of the dearest kind that it may be."""
    ceilings = {
        market: max(
            (price.ceiling for offer, price in priced if offer.placement.market is market), default=0.0
        )
        for market in Market
    }
    spot, dearest = ceilings[Market.SPOT], max(ceilings.values())
    on_demand = resources.on_demand_nodes if resources.spot else resources.max_nodes
    return on_demand * dearest + (resources.max_nodes - on_demand) * spot


def _quoted(offer: Offer, price: Price) -> QuotedOffer:
    return QuotedOffer(
        **offer.placement.model_dump(),
        num_cpus=offer.num_cpus,
        memory_bytes=offer.memory_bytes,
        num_gpus=offer.num_gpus,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        hourly=price.hourly,
        hourly_at_most=price.ceiling,
        price_source=price.source,
        price_at=price.at,
    )
