"""The components of a plan, played: those that are alike once, and what pipelines have in common once."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..pipeline import Component, Plan, components
from ..pipeline.flat import (
    FREE,
    HOPS_END,
    ROOMS,
    SIZE,
    TOTAL,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
    is_pipeline,
)
from .cluster import Cluster
from .code import Code
from .prepared import left_open, prepared
from .pricing import draw_apart, has_jitter, keep_log, list_sources, price
from .records import BACKWARDS


@dataclass(frozen=True, slots=True)
class Played:
    """What came of components that are alike: the cells of one of them, those before the rooms at least."""

    alike: Sequence[Component]
    cells: list[int]


def play_all(plan: Plan, cluster: Cluster, seed: int, code: Code, *, keeps_log: bool) -> list[Played]:
    """Play every component to its end. `keeps_log`: every operation is kept."""
    stage = _Stage(plan, cluster, _word(seed), code, keeps_log)
    families: dict[Hashable, dict[int, list[Component]]] = {}
    for component in components(plan):
        family = families.setdefault(_likeness(plan, component, cluster), {})
        family.setdefault(len(component.paths[0].micro_batches), []).append(component)
    return [played for family in families.values() for played in stage.play_family(family)]


def _likeness(plan: Plan, component: Component, cluster: Cluster) -> Hashable:
    """Equal for pipelines that differ in nothing but micro-batches and the names of workers."""
    if component.signature is None:
        return component.workers
    hops = component.paths[0].hops
    ranks, vm_of = [hop.worker for hop in hops], cluster.vm_of
    spans = [plan.ranges[rank] for rank in ranks]
    return (
        component.visits if len(ranks) > len(component.workers) else None,  # None: each worker once
        tuple(hop.range.start for hop in hops),  # they tile the sections
        tuple((span.start, span.stop) for span in spans),
        tuple(cluster.slowdown[rank] for rank in ranks),
        tuple(vm_of[one] == vm_of[other] for one, other in itertools.pairwise(ranks)),
    )


def _word(seed: int) -> int:
    """32 bits of any integer; those above are folded in."""
    word = 0
    while seed not in (0, -1):
        word ^= seed & 0xFFFFFFFF
        seed >>= 32
    return word if seed == 0 else word ^ 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Stage:
    plan: Plan
    cluster: Cluster
    seed: int
    code: Code
    keeps_log: bool

    def play_family(self, family: dict[int, list[Component]]) -> list[Played]:
        """Components that are alike, by their numbers of micro-batches."""
        result: list[Played] = []
        counts = sorted(family, reverse=True)
        while counts:
            count = counts.pop(0)
            alike = family[count]
            ready = prepared(self.plan, alike[0], count, self.code)
            records = list(ready.records)
            price(alike[0], records, self.cluster)
            if has_jitter(records):
                result += [self._played([component], records, ready.orders) for component in alike]
            elif self.keeps_log or not is_pipeline(records):
                result.append(self._played(alike, records, ready.orders))
            else:
                shorter = family[counts.pop(0)] if counts and counts[0] == count - 1 else ()
                result += self._played_straight(alike, shorter, records, ready.orders)
        return result

    def _played(self, alike: Sequence[Component], records: list[int], orders: Cells) -> Played:
        """Operation by operation; the delays of messages, if they are drawn, are those of the first."""
        records = list(records)
        draw_apart(alike[0], records)
        list_sources(records)
        if self.keeps_log:
            keep_log(records)
        cells = self.code.copied(orders, records[SIZE])
        self._write(cells, records)
        self.code.play(cells, self.seed)
        return self._seen(alike, cells)

    def _played_straight(
        self, longer: Sequence[Component], shorter: Sequence[Component], records: list[int], orders: Cells
    ) -> list[Played]:
        """Those alike, and those with one micro-batch less, which do the same until that is noticed."""
        code = self.code
        with (
            code.drawer.lend(records[SIZE], code.blank) as cells,
            code.drawer.lend(records[SIZE], code.blank) as others,
        ):
            self._write(cells, records)
            code.furnish_ends(cells)
            if not shorter:
                code.play_straight(cells, orders)
                return [self._seen(longer, cells)]
            other = prepared(self.plan, shorter[0], len(longer[0].paths[0].micro_batches), code)
            open_at = left_open(self.plan, longer[0], orders, other.orders, code)
            code.leave_open(cells, open_at)
            code.play_straight(cells, orders)
            code.take_over(others, cells, other.orders)
            for played, listed in ((cells, orders), (others, other.orders)):
                code.close(played)
                code.play_straight(played, listed)
            return [self._seen(longer, cells), self._seen(shorter, others)]

    def _write(self, cells: Cells, records: list[int]) -> None:
        """All but the orders and what they are read with."""
        self.code.write(cells, 0, records[: records[HOPS_END]])
        self.code.write(cells, records[FREE], records[records[FREE] : records[ROOMS]])

    def _seen(self, alike: Sequence[Component], cells: Cells) -> Played:
        for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
            assert cells[worker + BACKWARDS] == cells[worker + TOTAL], "the plan came to a halt"
        return Played(alike, self.code.read(cells, cells[SIZE] if self.keeps_log else cells[HOPS_END]))
