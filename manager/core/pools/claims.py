"""What a job claims of the pools of VMs that it shares with others."""

from __future__ import annotations

from collections import Counter

from ...spec.placement import Market, Placement
from ...spec.resources import CLOUDS
from ..facts import RefusalKind
from ..fold.renting import place_of, strikes_of
from ..observations import Observations
from ..state import JobState, wanted_vms
from ..strikes.table import Kind
from ..timing import Timing
from ..vms import Vm, VmStatus
from .shares import Claim, pool_of

_FULL = (RefusalKind.NO_CAPACITY, RefusalKind.QUOTA)


def claim_of(state: JobState, observations: Observations, timing: Timing, now: float) -> Claim:
    """The claim of a job that was submitted and has not ended."""
    assert state.spec is not None, "it was submitted"
    kept, resources = kept_vms(state), state.spec.resources
    least = max(resources.min_nodes, observations.needed_vms)
    short = observations.strikes.of(Kind.SHORT)
    asks_clouds = not short.count or now >= short.until(timing.strikes[Kind.SHORT])
    wanted = _placements(state, observations, asks_clouds=asks_clouds)
    return Claim(
        job=state.job,
        priority=state.spec.priority,
        submitted_at=state.submitted_at,
        least=least,
        most=max(least, wanted_vms(state)),
        pools=tuple(dict.fromkeys(pool_of(placement) for placement in wanted)),
        held=Counter(pool for vm in kept if (pool := pool_of_vm(vm)) is not None),
        trains=sum(vm.joined for vm in kept) >= least,
        is_active=state.active,
        refused=_refused(state, wanted),
    )


def kept_vms(state: JobState) -> list[Vm]:
    """Those that live, and are not to hand over."""
    return [vm for vm in state.live_vms if vm.status is not VmStatus.NOTICED]


def pool_of_vm(vm: Vm) -> str | None:
    """The pool that a VM is of; None if nothing is known of it, as in journals of earlier versions."""
    return pool_of(vm.attempt.placement) if vm.attempt is not None else None


def is_on_site(state: JobState, placement: Placement) -> bool:
    """Whether VMs there would be near those that the job has."""
    assert state.spec is not None, "VMs are for submitted jobs"
    several_zones = len(state.spec.resources.zones_of(placement.provider)) > 1
    for vm in state.live_vms:
        if vm.attempt is None or vm.attempted_at is None:
            continue
        other = vm.attempt.placement
        if (other.provider, other.region) != (placement.provider, placement.region):
            return False
        if other.zone != placement.zone and not several_zones:
            return False
    return True


def _placements(state: JobState, observations: Observations, *, asks_clouds: bool) -> list[Placement]:
    """Where the job may ask for VMs."""
    assert state.spec is not None, "it was submitted"
    resources = state.spec.resources
    own = [Placement(provider=name) for name in resources.providers if name not in CLOUDS]
    offered = [offer.placement for offer in observations.offers or () if offer.placement.provider in CLOUDS]
    spot_alone = resources.spot and not resources.on_demand_nodes
    wanted = [place for place in offered if place.market is Market.SPOT or not spot_alone]
    return own + (wanted if asks_clouds else [])


def _refused(state: JobState, wanted: list[Placement]) -> frozenset[str]:
    """Pools of clouds of which every place that may be asked has refused VMs, and given none since."""
    asked = [place for place in wanted if is_on_site(state, place)]
    given = {pool_of(place) for place in asked if not any(_is_refused(state, place, it) for it in _FULL)}
    return frozenset(pool_of(place) for place in wanted if place.provider in CLOUDS) - given


def _is_refused(state: JobState, place: Placement, kind: RefusalKind) -> bool:
    return state.strikes.count(strikes_of(kind), place_of(place, kind)) > 0
