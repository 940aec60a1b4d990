"""What a job claims of the pools of VMs that it shares with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias

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

FULL = (RefusalKind.NO_CAPACITY, RefusalKind.QUOTA)
_ASKS_WITHIN_S = 60.0  # after the pause that follows a refusal


def claim_of(state: JobState, observations: Observations, timing: Timing, now: float) -> Claim:
    """The claim of a job that was submitted. One that has ended has VMs that are not gone yet, at most."""
    assert state.spec is not None, "it was submitted"
    kept, least = kept_vms(state), least_vms(state, observations)
    leaving = [vm for vm in state.live_vms if vm.yielded and vm.status is VmStatus.NOTICED]
    if state.ended is not None:
        leaving.extend(state.leaving.values())
    short = observations.strikes.of(Kind.SHORT)
    asks_clouds = not short.count or now >= short.until(timing.strikes[Kind.SHORT])
    wanted = _placements(state, observations, asks_clouds=asks_clouds)
    return Claim(
        job=state.job,
        priority=state.spec.priority,
        submitted_at=state.submitted_at,
        least=least,
        most=max(least, wanted_vms(state)),
        is_min=least == state.spec.resources.min_nodes,
        pools=tuple(dict.fromkeys(pool_of(placement) for placement in wanted)),
        held=_by_pool(kept),
        leaving=_by_pool(leaving),
        trains=sum(vm.joined for vm in kept) >= least,
        is_active=state.active,
        refused=_refused(state, timing, wanted, now),
    )


def least_vms(state: JobState, observations: Observations) -> int:
    """With fewer VMs the job does not train: the user's word, or no plan was found for them."""
    assert state.spec is not None, "VMs are for submitted jobs"
    return max(state.spec.resources.min_nodes, observations.needed_vms)


def kept_vms(state: JobState) -> list[Vm]:
    """Those that live, and are not to hand over."""
    return [vm for vm in state.live_vms if vm.status is not VmStatus.NOTICED]


def pool_of_vm(vm: Vm) -> str | None:
    """The pool that a VM is of; None if nothing is known of it, as in journals of earlier versions."""
    return pool_of(vm.attempt.placement) if vm.attempt is not None else None


def _by_pool(vms: Iterable[Vm]) -> Counter[str]:
    return Counter(pool for vm in vms if (pool := pool_of_vm(vm)) is not None)


Site: TypeAlias = tuple[str, str, str]
"""Provider, region, zone."""


def sites(state: JobState) -> frozenset[Site]:
    """Where the job has VMs, or has asked for some."""
    placed = (vm.attempt.placement for vm in state.live_vms if vm.attempt is not None and vm.attempted_at)
    return frozenset((it.provider, it.region, it.zone) for it in placed)


def is_on_site(state: JobState, placement: Placement, among: Set[Site] | None = None) -> bool:
    """Whether VMs there would be near those that the job has, which are at `among`, the state's `sites`."""
    assert state.spec is not None, "VMs are for submitted jobs"
    several_zones = len(state.spec.resources.zones_of(placement.provider)) > 1
    here = placement.provider, placement.region, placement.zone
    return all(
        site[:2] == here[:2] and (several_zones or site == here)
        for site in (sites(state) if among is None else among)
    )


def _placements(state: JobState, observations: Observations, *, asks_clouds: bool) -> list[Placement]:
    """Where the job may ask for VMs: near those that it has."""
    assert state.spec is not None, "it was submitted"
    resources = state.spec.resources
    own = [Placement(provider=name) for name in resources.providers if name not in CLOUDS]
    offered = [offer.placement for offer in observations.offers or () if offer.placement.provider in CLOUDS]
    spot_alone = resources.spot and not resources.on_demand_nodes
    wanted = [place for place in offered if place.market is Market.SPOT or not spot_alone]
    places, there = own + (wanted if asks_clouds else []), sites(state)
    return [place for place in places if not resources.clouds or is_on_site(state, place, there)]


def _refused(state: JobState, timing: Timing, wanted: Sequence[Placement], now: float) -> dict[str, float]:
    """Pools of clouds that have refused VMs for want of capacity and given none since, and since when.

    One that the job has not asked again, though it might have, is left out: something else keeps it back.
    """
    found = dict[str, float]()
    for place in wanted:
        for kind in FULL if place.provider in CLOUDS else ():
            strikes = state.strikes.of(strikes_of(kind), place_of(place, kind))
            if strikes.count and now < strikes.until(timing.strikes[strikes_of(kind)]) + _ASKS_WITHIN_S:
                found[pool_of(place)] = max(strikes.since, found.get(pool_of(place), 0.0))
    return found
