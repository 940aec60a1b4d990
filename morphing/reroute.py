"""Rerouting (SlipStream §3.1): the work of dead workers goes to their peers, and nothing moves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline import Hop, Path, Plan, Range
from .request import Infeasible


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A plan of the survivors. `survivors`: in rank order, the ranks that they had before."""

    plan: Plan
    survivors: tuple[int, ...]


def reroute(
    plan: Plan, dead: Collection[int], slowdown: Sequence[float] | None = None
) -> Rerouted | Infeasible:
    """The plan without the workers of the ranks `dead`, in which every survivor keeps its range.

    Where a path met a dead worker, it goes through survivors that host the same sections, and then returns.
    Its micro-batches are dealt to them so that all have as nearly the same work as possible, counted in
    micro-batches times sections times `slowdown`, which is by old rank. Infeasible where a section that the
    dead hosted has no other host.
    """
    survivors = [rank for rank in range(plan.num_workers) if rank not in dead]
    hosted = {section for rank in survivors for section in plan.ranges[rank].sections}
    if lost := [section for section in range(plan.num_sections) if section not in hosted]:
        return Infeasible(f"nobody who lives hosts {_named(lost)}, so no peer can take its micro-batches")
    paths = [_without(plan, path, dead) for path in plan.paths if path.micro_batches]
    dealt = _dealt(plan, paths, survivors, slowdown or [1.0] * plan.num_workers)
    new_rank = {rank: number for number, rank in enumerate(survivors)}
    carried: dict[tuple[Hop, ...], list[int]] = {}
    for path, peers in zip(paths, dealt, strict=True):
        known: dict[tuple[int, ...], list[int]] = {}
        for micro_batch, taken in zip(path.micro_batches, _turns(path, peers), strict=True):
            if taken not in known:
                hops = (Hop(new_rank[rank], span) for rank, span in zip(taken, path.spans, strict=True))
                known[taken] = carried.setdefault(tuple(hops), [])
            known[taken].append(micro_batch)
    rerouted = replace(
        plan,
        ranges=tuple(plan.ranges[rank] for rank in survivors),
        paths=tuple(Path(hops, tuple(sorted(taken))) for hops, taken in carried.items()),
    )
    return Rerouted(rerouted, tuple(survivors))


@dataclass(frozen=True, slots=True)
class _OpenPath:
    """A path; `hosts` has, for each of its `spans`, the survivors that could run it. Where its own worker
    lives, that is the only one."""

    spans: tuple[Range, ...]
    hosts: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]


def _without(plan: Plan, path: Path, dead: Collection[int]) -> _OpenPath:
    found: list[tuple[Range, tuple[int, ...]]] = []
    for hop in path.hops:
        if hop.worker in dead:
            found += _tiled(plan, hop.range, dead)
        else:
            found.append((hop.range, (hop.worker,)))
    spans, hosts = zip(*found, strict=True)
    return _OpenPath(spans, hosts, path.micro_batches)


def _tiled(plan: Plan, span: Range, dead: Collection[int]) -> Iterator[tuple[Range, tuple[int, ...]]]:
    """The fewest parts of a dead worker's span that survivors host whole, each with these survivors."""
    start = span.start
    while start < span.stop:
        hosts = [rank for rank in plan.hosts(start) if rank not in dead]
        stop = min(span.stop, max(plan.ranges[rank].stop for rank in hosts))
        yield Range(start, stop), tuple(rank for rank in hosts if plan.ranges[rank].stop >= stop)
        start = stop


_Peers = Mapping[int, Counter[int]]
"""Of one path: {place of an open span: {survivor: number of micro-batches}}."""


def _dealt(
    plan: Plan, paths: Sequence[_OpenPath], survivors: Sequence[int], slowdown: Sequence[float]
) -> list[_Peers]:
    """How many of each path's micro-batches each survivor takes, where the path's own worker is dead.

    Micro-batch by micro-batch, the one with the least work takes the next.
    """
    work = dict.fromkeys(survivors, 0.0)
    for path in paths:
        for span, hosts in zip(path.spans, path.hosts, strict=True):
            if len(hosts) == 1:
                work[hosts[0]] += len(path.micro_batches) * len(span) * slowdown[hosts[0]]
    dealt: list[_Peers] = [
        {place: Counter() for place, hosts in enumerate(path.hosts) if len(hosts) > 1} for path in paths
    ]
    of_micro_batch = {number: index for index, path in enumerate(paths) for number in path.micro_batches}
    for number in range(plan.num_micro_batches):
        path = paths[of_micro_batch[number]]
        for place, taken in dealt[of_micro_batch[number]].items():
            costs = {rank: len(path.spans[place]) * slowdown[rank] for rank in path.hosts[place]}
            peer = min(costs, key=lambda rank: (work[rank] + costs[rank], rank))
            work[peer] += costs[peer]
            taken[peer] += 1
    return dealt


def _turns(path: _OpenPath, peers: _Peers) -> Iterator[tuple[int, ...]]:
    """For each micro-batch of the path, the worker of each span. Peers take turns, so that each has its
    micro-batches spread over the step."""
    num = len(path.micro_batches)
    by_place = [
        _spread(peers[place]) if place in peers else [hosts[0]] * num
        for place, hosts in enumerate(path.hosts)
    ]
    return zip(*by_place, strict=True)


def _spread(shares: Mapping[int, int]) -> list[int]:
    turns = [((turn + 0.5) / share, rank) for rank, share in shares.items() for turn in range(share)]
    return [rank for _, rank in sorted(turns)]


def _named(sections: Sequence[int]) -> str:
    """Sections as a reader writes them: `section 3` or `sections 3..5 and 9`."""
    runs = [
        [section for _, section in run]
        for _, run in itertools.groupby(enumerate(sections), key=lambda one: one[1] - one[0])
    ]
    written = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return f"section{'s' if len(sections) > 1 else ''} {' and '.join(written)}"
