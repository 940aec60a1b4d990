"""The order in which offers are tried: spot first, types as the job file says, a type's zones by price."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ..spec.job_spec import Resources
from ..spec.placement import Market, Offer
from .cost import price_of
from .observations import Observations
from .state import JobState, vm_of


def in_order(
    resources: Resources, offers: Sequence[Offer], now: float, measured: Mapping[str, float] | None = None
) -> list[Offer]:
    """The offers in the order in which they are tried; of equal ones as they were given.

    `measured`: how fast VMs of a type train, by instance type; for other types the job file's `speed` holds.
    """

    def price(offer: Offer) -> float:
        found = price_of(resources, offer, now)
        return math.inf if found is None else found.hourly

    if resources.order == "price":
        speed = _speed_of(resources.speed or {}, measured or {})
        return sorted(
            offers,
            key=lambda it: (
                it.placement.market is not Market.SPOT,
                price(it) / speed(it.placement.instance_type),
            ),
        )
    ordered, places = list(offers), defaultdict[tuple[str, ...], list[int]](list)
    for index, offer in enumerate(offers):
        place = offer.placement
        places[place.provider, place.market, place.region, place.instance_type].append(index)
    for indices in places.values():
        for index, offer in zip(indices, sorted((offers[i] for i in indices), key=price), strict=True):
            ordered[index] = offer
    return ordered


def measured_speeds(state: JobState, observations: Observations) -> dict[str, float]:
    """{instance type: how fast the job's VMs of that type train, as the sum over their workers}."""
    by_vm = defaultdict[str, list[float]](list)
    for incarnation, pace in observations.paces.items():
        if pace.ratios and pace.median > 0.0:
            by_vm[vm_of(incarnation.worker)].append(1.0 / pace.median)
    by_type = defaultdict[str, list[float]](list)
    for name, speeds in by_vm.items():
        vm = state.vms.live.get(name)
        if vm is not None and vm.attempt is not None and vm.attempt.placement.instance_type:
            by_type[vm.attempt.placement.instance_type].append(sum(speeds))
    return {name: statistics.median(speeds) for name, speeds in by_type.items()}


def _speed_of(stated: Mapping[str, float], measured: Mapping[str, float]) -> Callable[[str], float]:
    """Stated speeds only compare types, so they are scaled to those that are measured."""
    scales = [speed / stated.get(name, 1.0) for name, speed in measured.items()]
    scale = statistics.median(scales) if scales else 1.0
    return lambda name: measured.get(name, scale * stated.get(name, 1.0))
