"""Simulates the components of a plan; equal ones only once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..pipeline.arrays import Arrays, ForwardTurn, StaticOrder
from ..pipeline.components import Component, components
from ..pipeline.plan import Plan
from .cluster import Cluster
from .fields import Arrival, Link, SimHop, SimOperation, SimWorker, State, Wire
from .pricing import Priced, price


@dataclass(frozen=True, slots=True)
class Kernels:
    """The code that runs once per operation, and the arrays of records that it takes.

    Interpreted or compiled: see `backends`.
    """

    static_order: Callable[[Plan, Component], StaticOrder]
    """The result is cached and shared: do not modify it."""
    run: Callable[[State, int], None]
    """`engine.run`, or the same compiled."""
    arrays: Arrays


@dataclass(frozen=True)
class PlayedPipeline:
    """The simulated records of one of several equal components (`alike`)."""

    alike: Sequence[Component]
    workers: Sequence[SimWorker]
    hops: Sequence[SimHop]
    operations: Sequence[SimOperation]
    state: State
    """All records. Those of single operations are many, and are read only where they are looked at."""
    arrays: Arrays

    @cached_property
    def turns(self) -> Sequence[ForwardTurn]:
        return self.arrays.read(ForwardTurn, self.state.turns)

    @cached_property
    def arrivals(self) -> Sequence[Arrival]:
        return self.arrays.read(Arrival, self.state.arrivals)


def play_pipelines(plan: Plan, cluster: Cluster, kernels: Kernels, *, seed: int) -> list[PlayedPipeline]:
    """Simulate every component of the plan."""
    families: dict[Hashable, list[Component]] = {}
    for component in components(plan):
        families.setdefault(_likeness(plan, component, cluster), []).append(component)
    played: list[PlayedPipeline] = []
    for family in families.values():
        priced = price(family[0], cluster)
        if not priced.has_jitter:
            played.append(_play(plan, family, priced, seed, kernels))
            continue
        for component in family:  # each has its own jitter
            priced = price(component, cluster)
            played.append(_play(plan, [component], priced, seed, kernels))
    return played


def _likeness(plan: Plan, component: Component, cluster: Cluster) -> Hashable:
    """A key that is equal for pipelines that differ only in names of workers and micro-batches."""
    if component.signature is None:
        return component.workers
    path = component.paths[0]
    ranks, vm_of = [hop.worker for hop in path.hops], cluster.vm_of
    spans = [plan.ranges[rank] for rank in ranks]
    return (
        (len(path.micro_batches), path.open_from, path.held),
        component.window,
        component.visits if len(ranks) > len(component.workers) else None,  # None: each worker once
        tuple(hop.range.start for hop in path.hops),  # they tile the sections
        tuple((span.start, span.stop) for span in spans),
        tuple(cluster.slowdown[rank] for rank in ranks),
        tuple(vm_of[one] == vm_of[other] for one, other in itertools.pairwise(ranks)),
        tuple(cluster.starts_ns[rank] for rank in ranks) if cluster.starts_ns else (),
    )


def _play(
    plan: Plan, alike: Sequence[Component], priced: Priced, seed: int, kernels: Kernels
) -> PlayedPipeline:
    order, arrays = kernels.static_order(plan, alike[0]), kernels.arrays
    for index, worker in enumerate(priced.workers):
        if alike[0].window is not None:
            worker.window = alike[0].window
        if plan.schedule.limits_itself:
            # Bounded memory is the point of 1F1B: running ahead may not exceed what its own order needs.
            worker.window = min(worker.window, order.most_in_flight[index])
    state = State(
        workers=arrays.array(SimWorker, priced.workers),
        hops=arrays.array(SimHop, priced.hops),
        operations=arrays.array(SimOperation, priced.operations),
        links=arrays.array(Link, priced.links),
        wires=arrays.array(Wire, priced.wires),
        arrivals=arrays.make(Arrival, sum(hop.num_turns for hop in priced.hops)),
        turns=order.turns,
        entries=order.entries,
    )
    kernels.run(state, _word(seed))
    workers = arrays.read(SimWorker, state.workers)
    done = all(w.num_backwards == w.num_entries and not w.num_weights_left for w in workers)
    assert done, "the plan came to a halt"
    hops = arrays.read(SimHop, state.hops)
    return PlayedPipeline(alike, workers, hops, priced.operations, state, arrays)


def _word(seed: int) -> int:
    """Fold an integer of any size into 32 bits."""
    word = 0
    while seed not in (0, -1):
        word ^= seed & 0xFFFFFFFF
        seed >>= 32
    return word if seed == 0 else word ^ 0xFFFFFFFF
