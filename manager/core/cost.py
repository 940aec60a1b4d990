"""What VMs cost: as it is expected, and at most. A VM is paid for from its attempt until it is gone."""

from __future__ import annotations

from dataclasses import replace

from ..spec.job_spec import Resources
from ..spec.placement import STATED, Market, Offer, Price
from .state import JobState
from .vms import Spent, Vm

_LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, a minute at least


def price_of(resources: Resources, offer: Offer, now: float) -> Price | None:
    """What such a VM costs as its provider says, else as the user does."""
    if offer.price is not None or resources.hourly_price is None:
        return offer.price
    hourly, bid = resources.hourly_price, resources.max_price
    ceiling = bid if bid is not None and offer.placement.market is Market.SPOT else hourly
    return Price(hourly=min(hourly, ceiling), ceiling=ceiling, at=now, source=STATED)


def hourly_ceiling(state: JobState) -> float:
    """USD an hour, at most, for all that is not gone for certain."""
    return sum(vm.price.ceiling for vm in state.counted_vms if vm.price is not None)


def spent_by(state: JobState, now: float) -> Spent:
    """What the job has cost until now."""
    return sum((bill(vm, now) for vm in state.counted_vms), start=state.spent)


def cost_of(state: JobState, vm: Vm, now: float) -> Spent:
    """What one of its VMs has cost until now, or until it was gone."""
    if is_paid(state, vm):
        return bill(vm, now)
    known = state.bills.get(vm.vm)
    return known.spent if known is not None else Spent()


def is_paid(state: JobState, vm: Vm) -> bool:
    """Whether it may cost something now: it is not gone for certain."""
    return vm.live or vm.vm in state.leaving


def bill(vm: Vm, until: float) -> Spent:
    """What the VM's newest attempt has cost until then, a minute at least; nothing came of the others."""
    if vm.attempt is None or vm.attempted_at is None or vm.price is None:
        return Spent()
    least = _cost_for(vm, vm.price, _LEAST_BILLED_S)
    return max(_so_far(vm, vm.price, vm.attempted_at, until), least, key=lambda spent: spent.at_most)


def bill_for(vm: Vm, ran_s: float) -> Spent:
    """What its newest attempt has cost that existed for so long, a minute at least."""
    if vm.attempted_at is None or vm.price is None:
        return Spent()
    return _cost_for(vm, vm.price, max(ran_s, _LEAST_BILLED_S))


def noted(vm: Vm, at: float, unseen_s: float, until: float | None = None) -> Vm:
    """The VM with what it has cost by `until`, or `at`, and in so many seconds more, as what it cost for
    certain. Where it is not known whether it was there until now, nothing is certain yet."""
    if vm.attempted_at is None or vm.price is None or (vm.must_end_by is not None and until is None):
        return vm
    so_far = _so_far(vm, vm.price, vm.attempted_at, at if until is None else until)
    so_far += _cost_for(vm, vm.price, unseen_s)
    return replace(vm, noted=so_far, noted_at=at, must_end_by=None)


def _so_far(vm: Vm, price: Price, attempted_at: float, until: float) -> Spent:
    """By the time since its attempt, or since what was noted; without the least that is billed. A VM that
    must have ended itself meanwhile costs nothing from then on."""
    since = attempted_at if vm.noted_at is None else vm.noted_at
    if vm.must_end_by is not None:
        until = min(until, vm.must_end_by)
    return vm.noted + _cost_for(vm, price, max(0.0, until - since))


def _cost_for(vm: Vm, price: Price, seconds: float) -> Spent:
    expected, at_most = seconds / 3600.0 * price.hourly, seconds / 3600.0 * price.ceiling
    if vm.attempt is not None and vm.attempt.placement.market is Market.SPOT:
        return Spent(spot=expected, at_most=at_most)
    return Spent(on_demand=expected, at_most=at_most)
