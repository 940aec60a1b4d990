"""The search space of a sweep: for each P and D the stages, the workers, and the split of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from ..pipeline.plan import Schedule
from ..simulator import Calibration
from .balance import Split, balance, split_micro_batches
from .bounds import AllReduceCosts, Bound
from .copies import copies_in_grid, most_copies, spread, too_few
from .placement import Roster, Slot, place
from .request import Candidate, Request
from .stages import HALVES, Mode, StageTable, stage_table

_MANY = 1000  # micro-batches, of which the first and the last few do not count


@dataclass(frozen=True, slots=True)
class Option:
    """A shape that fits into memory; `candidate` has the widest window that fits."""

    candidate: Candidate
    split: Split
    capacity: int
    least_s: float
    """A lower bound on the time of a step."""
    arranged: Arranged | None
    """Explicit placement, if some workers are slow; None if all workers are interchangeable."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """Workers in rank order, and the splits of micro-batches over replicas to try: by each replica's pace, or
    evenly, which may end the all-reduces sooner."""

    slots: Sequence[Slot]
    deals: Sequence[tuple[int, ...]]


class Options:
    """The shapes of one request, all of whose workers may be used."""

    def __init__(self, request: Request, on_host: bool) -> None:
        self.request = request
        calibration = request.calibration
        if on_host:
            calibration = calibration.with_optimizer_on_host()
        self.apart = len({slot.vm for slot in request.workers}) == len(request.workers)
        """Whether no two workers share a VM."""
        if self.apart:  # then no link is faster than inter-VM, which tightens the bounds
            calibration = replace(calibration, intra_vm=calibration.inter_vm)
        self.calibration: Calibration = calibration
        self.table: StageTable = stage_table(self.calibration, request.schedule)
        self.roster = Roster(request.workers, request.holding)
        self.on_host = on_host
        self.copies = request.tolerated_failures + 1
        """The least number of VMs that host each section."""
        self._recompute = {"on": (True,), "off": (False,), "auto": (False, True)}[request.recompute]
        # Jobs run Varuna's schedule; GPipe and 1F1B are there to be compared with as they were published.
        varuna = request.schedule is Schedule.VARUNA
        self._halves = calibration.has_halves and varuna and request.halves != "off"
        self._rings = cache(self._new_rings)

    def modes(self, depth: int) -> Sequence[Mode]:
        """How backwards may run in a pipeline of so many stages."""
        whole = [Mode(recompute) for recompute in self._recompute]
        return [*whole, HALVES] if self._may_split(depth, all(self._recompute)) else whole

    @cached_property
    def depths(self) -> Sequence[int]:
        """Every P that the numbers of sections and workers allow."""
        fixed = self.request.pipeline_parallel_degree
        most = min(len(self.roster), self.request.num_sections)
        return range(1, most + 1) if fixed is None else [fixed] if fixed <= most else []

    def replicas(self, depth: int) -> list[int]:
        """The D to try first: the one with the least bound; if some workers are slow, the D that uses all
        workers and the D that uses only fast ones."""
        fixed = self.request.data_parallel_degree
        if fixed is not None:
            return [fixed] if depth * fixed <= len(self.roster) else []
        largest = min(len(self.roster) // depth, self.request.num_micro_batches)
        if largest < self.copies:
            return [largest]  # to be rejected
        if self.mixed(depth * largest):
            fast = min(self.roster.num_fast // depth, largest)
            return sorted(
                {largest, max(self._useful(fast), self.copies if self.copies > 1 else 0)} - {0}, reverse=True
            )
        return [min(self.every_useful(depth, math.inf), key=lambda found: (found[1], found[0]))[0]]

    def every_useful(self, depth: int, most_s: float) -> Iterator[tuple[int, float]]:
        """Yield (D, lower bound of a step in seconds) for every useful D, largest first.

        Stops where no smaller D can take less than `most_s`, or, if that is infinite, have a lower bound than
        those before it. D is useful if it is the smallest whose fullest replica has as many micro-batches:
        all-reduces over fewer replicas may save more than one more micro-batch costs. Where deaths are
        weighed the largest is useful too, for each section then has more hosts.
        """
        num = self.request.num_micro_batches
        largest, enough_s = min(len(self.roster) // depth, num), most_s
        while largest >= self.copies:
            replicas = max(self._useful(largest), self.copies)
            if self.request.risk is not None and replicas < largest:
                yield largest, self._least_s(depth, largest)[1]
            pipeline_s, step_s = self._least_s(depth, replicas)
            if math.isinf(most_s):
                enough_s = min(enough_s, step_s)
            yield replicas, step_s
            if pipeline_s > enough_s or math.isinf(pipeline_s) or replicas == self.copies:
                return
            largest = replicas - 1

    def of(self, depth: int, replicas: int) -> list[Option | Candidate]:
        """The options of a shape, and candidates rejected because they do not fit."""
        found: list[Option | Candidate] = []
        copies = min(replicas, most_copies(self.request.workers, depth)) if self.copies > 1 else 1
        if copies < self.copies:
            row = Candidate(depth, replicas, self._recompute[0], self.on_host)
            return [replace(row, rejected=too_few(copies, self.copies))]
        for recompute in self._recompute:
            whole = self._fitting(depth, replicas, Mode(recompute))
            split = self._fitting(depth, replicas, HALVES) if self._may_split(depth, recompute) else []
            found += split if split and self.request.halves == "on" else [*whole, *split]
            unbounded = any(isinstance(one, Option) and one.candidate.window is None for one in whole)
            if unbounded and self.request.recompute == "auto":
                break  # memory bounds nothing, so recomputation could only be slower
        return found

    def least_s(self, depth: int, replicas: int) -> float:
        """A lower bound of a step of the shape, as if no worker were slow; infinite if no option fits."""
        return self._least_s(depth, replicas)[1]

    def _may_split(self, depth: int, recompute: bool) -> bool:
        """Whether a shape's backwards may be halves. Nobody waits for the I of a pipeline of one stage."""
        return self._halves and depth > 1 and not recompute

    def pipeline_s(self, depth: int, replicas: int) -> float:
        """A lower bound for this shape and for fewer replicas; infinite if no option fits."""
        return self._least_s(depth, replicas)[0]

    def _least_s(self, depth: int, replicas: int) -> tuple[float, float]:
        """Lower bounds (without all-reduces, of the whole step) of a shape's options, in seconds."""
        fullest = -(-self.request.num_micro_batches // replicas)
        shapes = [self._shape(depth, replicas, mode) for mode in self.modes(depth)]
        bounds = [shape.bound for shape in shapes if shape is not None]
        if not bounds:
            return math.inf, math.inf
        rings = self._rings(replicas)
        return (
            min(bound.pipeline_ns(fullest) for bound in bounds) / 1e9,
            min(bound.step_ns(fullest, rings) for bound in bounds) / 1e9,
        )

    def _new_rings(self, replicas: int) -> AllReduceCosts:
        return AllReduceCosts(self.table, replicas, self.request.num_micro_batches)

    def _useful(self, replicas: int) -> int:
        """The smallest D whose fullest replica has no more micro-batches than with `replicas`."""
        if not replicas:
            return 0
        fullest = -(-self.request.num_micro_batches // replicas)
        return -(-self.request.num_micro_batches // fullest)

    def mixed(self, count: int) -> bool:
        """Whether the first `count` workers have different speeds."""
        return count > self.roster.num_fast

    def _fitting(self, depth: int, replicas: int, mode: Mode) -> list[Option | Candidate]:
        """The options; a rejected candidate if whole backwards do not fit, nothing if halves do not."""
        count = depth * replicas
        candidate = Candidate(depth, replicas, mode.recompute, self.on_host, mode.halves)
        shape = self._shape(depth, replicas, mode)
        if shape is None:
            if mode.halves:
                return []
            why = f"no split into {depth} stages fits into {megabytes(self.capacity(count))}"
            return [replace(candidate, rejected=why)]
        if not self.mixed(count):
            return [self._alike(candidate, shape)]
        found: list[Option | Candidate] = [self._arranged(candidate, shape.split)]
        if count - self.roster.num_fast <= replicas and depth > 1:
            capacity, slowdown = self.capacity(count), self.roster.slowdown(count)
            uneven = _splits(self.table, capacity, mode.recompute, slowdown).get(depth)
            if uneven is not None and _limit(self.table, uneven, mode, capacity) != 0:
                found.append(self._arranged(replace(candidate, slow_stage=uneven.slow), uneven))
        return found

    def _alike(self, candidate: Candidate, shape: _Shape) -> Option:
        """The option of workers of about the same speed, of which only the number matters."""
        replicas = candidate.data_parallel_degree
        fullest = -(-self.request.num_micro_batches // replicas)
        least_s = shape.bound.step_ns(fullest, self._rings(replicas)) / 1e9
        candidate = replace(candidate, window=_window(shape.limit, fullest))
        return Option(candidate, shape.split, self.capacity(candidate.used), least_s, None)

    def _arranged(self, candidate: Candidate, split: Split) -> Option:
        """The option of workers of different speeds: placed, with splits of the micro-batches to try."""
        depth, replicas = candidate.pipeline_parallel_degree, candidate.data_parallel_degree
        capacity = self.capacity(candidate.used)
        mode = Mode(candidate.recompute, candidate.halves)
        limit = _limit(self.table, split, mode, capacity)
        slots = self.placed(candidate.used, split, keeping=False)
        factors = [
            tuple(slot.slowdown for slot in slots[first : first + depth])
            for first in range(0, len(slots), depth)
        ]
        bounds = {
            each: Bound(self.table, split.stages, mode, slowdown=each, window=limit) for each in set(factors)
        }
        paces = [bounds[each].pace(self.request.num_micro_batches) for each in factors]
        by_pace = split_micro_batches(self.request.num_micro_batches, paces)
        evenly = split_micro_batches(self.request.num_micro_batches, [(0, 1)] * replicas)
        deals = tuple(dict.fromkeys((by_pace, evenly)))
        rings = self._rings(replicas)
        least_ns = min(
            max(bounds[each].step_ns(share, rings) for each, share in set(zip(factors, shares, strict=True)))
            for shares in deals
        )
        candidate = replace(candidate, window=_window(limit, max(map(max, deals))))
        return Option(candidate, split, capacity, least_ns / 1e9, Arranged(slots, deals))

    def placed(self, count: int, split: Split, *, keeping: bool) -> list[Slot]:
        """`count` workers in rank order, as `place` has them, or spread where that gives too few copies.

        `keeping`: each where it keeps most of what it holds.
        """
        holding = self.request.holding if keeping else {}
        weights = self.request.calibration.saved_bytes if keeping else ()
        slots = place(self.roster.used(count), split.stages, holding, weights, slow=split.slow)
        if copies_in_grid(slots, len(split.stages)) >= self.copies:
            return slots
        return spread(self.roster, count, split.stages, holding, weights)

    def capacity(self, count: int | None = None) -> int:
        """Bytes that a plan may use of each of the first `count` workers; None: of all."""
        limit = self.request.memory_limit_bytes
        anyone = self.copies > 1 and not self.apart  # may be used, so that sections live on enough VMs
        capacity = self.roster.memory_bytes(len(self.roster) if anyone or count is None else count)
        return capacity if limit is None else min(capacity, limit)

    def _shape(self, depth: int, replicas: int, mode: Mode) -> _Shape | None:
        """The shape's split and bound, as if all workers were as fast as the fastest."""
        capacity = self.capacity(depth * replicas)
        return _shape(self.table, depth, capacity, mode, self.roster.fastest)


class _Shape(NamedTuple):
    """A balanced split, how many micro-batches can be in flight (None: any), and the bound on its time."""

    split: Split
    limit: int | None
    bound: Bound


# None depends on the number of workers, so a job computes them once.
@lru_cache(maxsize=1024)
def _shape(table: StageTable, depth: int, capacity: int, mode: Mode, slowdown: float) -> _Shape | None:
    """None if no split fits.

    Where memory lets fewer micro-batches be in flight than there are stages, workers wait for each other. So
    a split that is less balanced, but leaves room for one more, is taken if it lets them pass faster. Halves
    take the split of whole backwards, since I and W take about as long as B, and no roomier one.
    """
    found = _balanced(table, depth, capacity, mode, slowdown, 1)
    if mode.halves:
        return found
    while found is not None and found.limit is not None and found.limit < depth:
        if not found.bound.window_sets_pace:
            break
        roomier = _balanced(table, depth, capacity, mode, slowdown, found.limit + 1)
        if roomier is None or roomier.bound.pace(_MANY)[1] >= found.bound.pace(_MANY)[1]:
            break
        found = roomier
    return found


@lru_cache(maxsize=1024)
def _balanced(
    table: StageTable, depth: int, capacity: int, mode: Mode, slowdown: float, window: int
) -> _Shape | None:
    """The most balanced split with room for so many micro-batches in flight, if their backwards are whole;
    None if there is none."""
    split = _splits(table, capacity, mode.recompute, None, window).get(depth)
    if split is None:
        return None
    limit = _limit(table, split, mode, capacity)
    if limit == 0:
        return None
    bound = Bound(table, split.stages, mode, slowdown=[slowdown] * depth, window=limit)
    return _Shape(split, limit, bound)


@lru_cache(maxsize=64)
def _splits(
    table: StageTable, capacity: int, recompute: bool, slowdown: float | None, window: int = 1
) -> Mapping[int, Split]:
    @cache
    def fits(start: int, stop: int) -> bool:
        room = table.memory(start, stop, Mode(recompute)).window(capacity)
        return room is None or room >= window

    return balance(table, table.num_sections, recompute=recompute, fits=fits, slowdown=slowdown)


def _limit(table: StageTable, split: Split, mode: Mode, capacity: int) -> int | None:
    """Micro-batches that the tightest stage can have in flight; None if memory does not bound them, 0 if not
    one fits."""
    limits: list[int] = []
    for stage, span in enumerate(split.stages):
        limit = table.memory(span.start, span.stop, mode).window(capacity)
        most = math.inf
        if table.schedule.limits_itself:
            # Micro-batches that wait in front of a stage are in flight on the stage before it.
            most = len(split.stages) - max(0, stage - 1)
        if limit is not None and limit < most:
            limits.append(limit)
    return min(limits, default=None)


def _window(limit: int | None, most: int) -> int | None:
    return limit if limit is not None and limit < most else None


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
