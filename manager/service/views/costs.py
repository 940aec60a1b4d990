"""Views of what a job and its VMs cost so far and per hour, in USD, from the core's count (`core.cost`)."""

from __future__ import annotations

from collections import defaultdict

from pydantic import BaseModel

from ...core.cost import cost_of, hourly_ceiling, is_paid, price_of, spent_by
from ...core.vms import Vm
from ...spec.placement import Market, Placement, Price
from ...spec.resources import CLOUDS
from ..runtime import Job


class PricedPlace(BaseModel):
    """A place at a cloud and what a VM costs there in USD an hour, including disk and address unless
    `price_source` says otherwise. `price_at`: Unix seconds of the price."""

    provider: str
    market: Market
    region: str
    zone: str
    instance_type: str
    hourly: float
    hourly_at_most: float
    price_source: str
    price_at: float


class VmCost(PricedPlace):
    """The cost of a VM. `hourly` and `hourly_at_most` are 0 once it is gone."""

    spent: float
    at_most: float


class MarketCost(BaseModel):
    """What the VMs of one market have cost, and what the living ones cost an hour."""

    spent: float
    hourly: float
    num_vms: int


class JobCost(BaseModel):
    """`spent` and `hourly` are expected; `at_most` and `hourly_at_most` count every VM at its ceiling until
    it is gone. What is left of a cap is counted at ceilings; None: no such cap. `prices`: {source: Unix
    seconds of the oldest price among living VMs}."""

    spot: MarketCost
    on_demand: MarketCost
    spent: float
    at_most: float
    hourly: float
    hourly_at_most: float
    max_hourly_cost: float | None
    hourly_left: float | None
    budget: float | None
    budget_left: float | None
    prices: dict[str, float]


class Costs:
    """The costs of one job at one moment."""

    def __init__(self, job: Job, now: float) -> None:
        self._state = job.state
        self._now = now
        self._prices: dict[Placement, Price] = {}  # as last asked for
        spec = job.state.spec
        if spec is not None:
            priced = (
                (it.placement, price_of(spec.resources, it, now)) for it in job.observations.offers or ()
            )
            self._prices = {place: price for place, price in priced if price is not None}

    def of_job(self) -> JobCost | None:
        """The job's costs; None for a job without clouds."""
        state, spec = self._state, self._state.spec
        if spec is None or not spec.resources.clouds:
            return None
        spent, at_most = spent_by(state, self._now), hourly_ceiling(state)
        hourly: dict[Market, list[float]] = defaultdict(list)
        prices: dict[str, float] = {}
        for vm in state.counted_vms:
            price = self._price_now(vm)
            if price is not None and vm.attempt is not None:
                hourly[vm.attempt.placement.market].append(price.hourly)
                prices[price.source] = min(price.at, prices.get(price.source, price.at))
        caps = spec.resources
        return JobCost(
            spot=_of_market(spent.spot, hourly[Market.SPOT]),
            on_demand=_of_market(spent.on_demand, hourly[Market.ON_DEMAND]),
            spent=spent.spot + spent.on_demand,
            at_most=spent.at_most,
            hourly=sum(sum(them) for them in hourly.values()),
            hourly_at_most=at_most,
            max_hourly_cost=caps.max_hourly_cost,
            hourly_left=None if caps.max_hourly_cost is None else caps.max_hourly_cost - at_most,
            budget=caps.budget,
            budget_left=None if caps.budget is None else caps.budget - spent.at_most,
            prices=prices,
        )

    def of_vm(self, vm: Vm) -> VmCost | None:
        """The VM's costs; None if it is not billed, or was never created."""
        if vm.attempt is None or vm.price is None or vm.attempt.placement.provider not in CLOUDS:
            return None
        spent = cost_of(self._state, vm, self._now)
        place, now = vm.attempt.placement, self._price_now(vm)
        shown = now or vm.price
        return VmCost(
            **place.model_dump(),
            spent=spent.spot + spent.on_demand,
            at_most=spent.at_most,
            hourly=now.hourly if now is not None else 0.0,
            hourly_at_most=vm.price.ceiling if now is not None else 0.0,
            price_source=shown.source,
            price_at=shown.at,
        )

    def _price_now(self, vm: Vm) -> Price | None:
        """The newest known price; None if the VM is not, or no longer, billed."""
        if vm.attempt is None or vm.price is None or not is_paid(self._state, vm):
            return None
        if vm.attempt.placement.provider not in CLOUDS:
            return None
        return self._prices.get(vm.attempt.placement, vm.price)


def not_released(job: Job, now: float) -> list[str]:
    """A note on each ended VM that could not be released: why, and what it costs until it is gone."""
    return [
        f"{vm.vm} has ended, and is paid for until its cloud says that it is gone: at most "
        f"{vm.price.ceiling:g} USD an hour, {cost_of(job.state, vm, now).at_most:.2f} USD so far "
        f"({vm.not_released})"
        for vm in job.state.leaving.values()
        if vm.not_released and vm.price is not None
    ]


def _of_market(spent: float, hourly: list[float]) -> MarketCost:
    return MarketCost(spent=spent, hourly=sum(hourly), num_vms=len(hourly))
