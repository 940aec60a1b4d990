"""The calibration of an emulated cluster: all its workers at once, so that the machine that they share is as
busy as it will be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product

from makara.pipeline import Range, grid
from makara.simulator import Calibration
from makara.simulator.calibration.links import AllReduce
from makara.simulator.calibration.measurements import times_of
from makara.simulator.calibration.statistics import summarise
from makara.worker.execution.costs import ExecutorCosts, Ran, costs_of, stand_in_plans

from .cases import Planner
from .fleet import Fleet
from .networks import IDEAL, Network
from .worker import StandIn, Sums

_SUM_BYTES = (64, 25_000)
_SUM_REPEATS = 4


def calibrated(workers: Fleet) -> Calibration:
    """Each worker measures each section by itself; the median of what they find. Then what the executor
    costs. The links are those of `IDEAL`."""
    found: list[Calibration] = workers.tell(workers.names, "calibrate")
    medians = {name: _medians([getattr(one, name) for one in found]) for name in times_of(found[0])}
    costs = _executor_costs(workers)
    inter_vm, intra_vm = IDEAL.links()
    return replace(found[0], **medians, **asdict(costs), inter_vm=inter_vm, intra_vm=intra_vm)


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.median, zip(*rows, strict=True)))


def _executor_costs(workers: Fleet) -> ExecutorCosts:
    """On pipelines of three, over wires that take no time."""
    plans = stand_in_plans(len(workers.names) // 3)
    members = workers.names[: plans[0].num_workers]
    vms = tuple(IDEAL.vm(index) for index in range(len(members)))
    order = StandIn(workers.generation(plans[0], members), vms, IDEAL, plans)
    answers: list[tuple[list[list[Ran]], float]] = workers.tell(members, order)
    serial, steady = (
        {rank: ran[number] for rank, (ran, _) in enumerate(answers)} for number in range(len(plans))
    )
    return costs_of(plans, (serial, steady), statistics.mean(handover for _, handover in answers))


def planner_on(workers: Fleet, network: Network, calibration: Calibration) -> Planner:
    """A planner that knows the network, and all-reduces over it as measured."""
    sums = tuple(sums_on(workers, network))
    return Planner(calibration, network, sums, workers.names, workers.num_micro_batches)


def sums_on(workers: Fleet, network: Network) -> list[AllReduce]:
    """All-reduces of a few and of many bytes over rings of all workers, of half, ... of two, as this network
    and this machine make them: from when the last of a ring has come until all have gone."""
    count = len(workers.names)
    sizes = [count // parts for parts in range(1, count // 2 + 1) if count % parts == 0]
    rings = tuple(tuple(tuple(range(at, at + size)) for at in range(0, count, size)) for size in sizes)
    vms = tuple(network.vm(index) for index in range(count))
    everyone = workers.generation(grid([Range(0, 1)], count, count), workers.names)
    order = Sums(everyone, vms, network, rings, _SUM_BYTES, _SUM_REPEATS)
    answers: list[list[tuple[float, float]]] = workers.tell(workers.names, order)
    each = zip(*answers, strict=True)
    seconds: dict[tuple[bool, int, int], list[float]] = {}
    for ring, size_bytes, _ in product(rings, _SUM_BYTES, range(_SUM_REPEATS)):
        times = next(each)
        for group in ring:
            same_vm = len({vms[rank] for rank in group}) == 1
            took_s = max(times[rank][1] for rank in group) - max(times[rank][0] for rank in group)
            seconds.setdefault((same_vm, len(group), size_bytes), []).append(took_s)
    return [
        AllReduce(same_vm=same_vm, ring=size, size_bytes=size_bytes, in_flight=1, seconds=summarise(found))
        for (same_vm, size, size_bytes), found in seconds.items()
    ]
