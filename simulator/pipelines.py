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
from .prepared import prepared, records_of
from .pricing import draw_apart, has_jitter, keep_log, price
from .records import BACKWARDS, WINDOW


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
            cells = self._priced(family[count][0], count)
            if has_jitter(cells):
                result += [self._drawn(component, cells) for component in family[count]]
            elif counts and counts[0] == count - 1 and not self.keeps_log:
                alike = family[counts.pop(0)]
                orders = prepared(self.plan, alike[0], count, self.code)
                shorter = self.code.copied(orders, len(orders))
                self._play_both(cells, shorter)
                result += [self._seen(family[count], cells), self._seen(alike, shorter)]
            else:
                self._play(cells)
                result.append(self._seen(family[count], cells))
        return result

    def _priced(self, component: Component, capacity: int) -> Cells:
        """Cells to be played; on a lone path with room for as many micro-batches as `capacity`."""
        orders = prepared(self.plan, component, capacity, self.code)
        records = records_of(component, capacity)
        price(component, records, self.cluster)
        for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
            records[worker + WINDOW] = orders[worker + WINDOW]
        if self.keeps_log:
            keep_log(records)
        cells = self.code.copied(orders, records[SIZE])
        self.code.write(cells, 0, records[: records[HOPS_END]])
        self.code.write(cells, records[FREE], records[records[FREE] : records[ROOMS]])
        return cells

    def _drawn(self, component: Component, priced: Cells) -> Played:
        """One of several alike whose messages' delays are its own."""
        cells = self.code.copied(priced, len(priced))
        draw_apart(component, cells)
        self._play(cells)
        return self._seen([component], cells)

    def _play_both(self, cells: Cells, shorter: Cells) -> None:
        """Pipelines of which the second has a micro-batch less do the same until that is noticed."""
        self.code.leave_open(cells, shorter)
        assert not self._go_on(cells)
        self.code.take_over(shorter, cells)
        for one in (cells, shorter):
            self.code.close(one)
            self._play(one)

    def _play(self, cells: Cells) -> None:
        assert self._go_on(cells)
        for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
            assert cells[worker + BACKWARDS] == cells[worker + TOTAL], "the plan came to a halt"

    def _go_on(self, cells: Cells) -> bool:
        if self.keeps_log or has_jitter(cells) or not is_pipeline(cells):
            return self.code.play(cells, self.seed)
        return self.code.play_straight(cells)

    def _seen(self, alike: Sequence[Component], cells: Cells) -> Played:
        return Played(alike, self.code.read(cells, cells[SIZE] if self.keeps_log else cells[HOPS_END]))
