"""What VMs cost: as it is expected, and at most. A VM is paid for from its attempt until it is gone."""

from __future__ import annotations

from ..spec.placement import Market
from .state import JobState, Spent, Vm

_LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, a minute at least


def hourly_ceiling(state: JobState) -> float:
    """USD an hour, at most, for all that is not gone for certain."""
    return sum(vm.price.ceiling for vm in state.counted_vms if vm.price is not None)


def spent_by(state: JobState, now: float) -> Spent:
    """What the job has cost until now."""
    spent = state.spent
    for vm in state.counted_vms:
        spent = with_bill(spent, vm, now)
    return spent


def with_bill(spent: Spent, vm: Vm, until: float) -> Spent:
    """With what the VM's newest attempt has cost until then."""
    if vm.attempt is None or vm.attempted_at is None or vm.price is None:
        return spent
    hours = max(_LEAST_BILLED_S, until - vm.attempted_at) / 3600.0
    expected, at_most = hours * vm.price.hourly, spent.at_most + hours * vm.price.ceiling
    if vm.attempt.placement.market is Market.SPOT:
        return Spent(spent.spot + expected, spent.on_demand, at_most)
    return Spent(spent.spot, spent.on_demand + expected, at_most)
