"""Balancing: splits the sections into P stages whose slowest is as fast as possible (Varuna §4.4), and the
micro-batches among replicas so that slow and fast ones end together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ..pipeline import Range
from .stages import StageTable

Fits = Callable[[int, int], bool]
"""Whether a stage of the sections start..stop-1 fits into memory; called with (start, stop)."""


class Split(NamedTuple):
    """Stages in order; `slow` is the index of the stage for slow workers, if the split was made for them."""

    stages: tuple[Range, ...]
    slow: int | None = None


class _Prefix(NamedTuple):
    """The best split found of the first sections into a given number of stages."""

    slowest_ns: int
    stops: tuple[int, ...]
    slow: int | None


def balance(
    table: StageTable, max_depth: int, *, recompute: bool, fits: Fits, slowdown: float | None = None
) -> Mapping[int, Split]:
    """For each P in 1..max_depth, the split into P stages that fit, with the least maximum time.

    A P without such a split is left out. With a `slowdown`, exactly one stage (the best choice of one) takes
    that many times as long. Exact, by dynamic programming over (number of stages, first section after them),
    for any P <= K. A stage's time grows with its sections, so the inner loop stops early: about K² ln K steps
    in all. Ties go to the earlier cuts, so the result is deterministic.
    """

    @cache
    def ordinary(start: int, stop: int) -> int:
        return table.work_ns(start, stop, recompute)

    @cache
    def slow(start: int, stop: int) -> int:
        return table.work_ns(start, stop, recompute, slowdown or 1.0)

    whole = table.num_sections
    even: list[_Prefix | None] = [_Prefix(0, (), None), *[None] * whole]  # without the slow stage
    with_slow: list[_Prefix | None] = [None] * (whole + 1)
    splits: dict[int, Split] = {}
    for depth in range(1, min(max_depth, whole) + 1):
        if slowdown is not None:
            placed = [prefix and prefix._replace(slow=depth - 1) for prefix in even]
            with_slow = _better(_longer(with_slow, ordinary, fits), _longer(placed, slow, fits))
        even = _longer(even, ordinary, fits)
        found = (even if slowdown is None else with_slow)[whole]
        if found is not None:
            bounds = itertools.pairwise((0, *found.stops))
            splits[depth] = Split(tuple(Range(start, stop) for start, stop in bounds), found.slow)
    return splits


def _longer(
    prefixes: list[_Prefix | None], work_ns: Callable[[int, int], int], fits: Fits
) -> list[_Prefix | None]:
    """Extend each prefix by one stage."""
    first = next((stop for stop, prefix in enumerate(prefixes) if prefix is not None), len(prefixes))
    longer: list[_Prefix | None] = [None] * len(prefixes)
    for stop in range(first + 1, len(prefixes)):
        best: _Prefix | None = None
        for start in range(stop - 1, first - 1, -1):
            stage_ns = work_ns(start, stop)
            if best is not None and stage_ns > best.slowest_ns:
                break  # it only gets longer
            before = prefixes[start]
            if before is None:
                continue
            slowest_ns = max(before.slowest_ns, stage_ns)
            better = best is None or (slowest_ns, before.stops) < (best.slowest_ns, best.stops)
            if better and fits(start, stop):
                best = _Prefix(slowest_ns, before.stops, before.slow)
        longer[stop] = best and _Prefix(best.slowest_ns, (*best.stops, stop), best.slow)
    return longer


def _better(one: list[_Prefix | None], other: list[_Prefix | None]) -> list[_Prefix | None]:
    return [
        min((prefix for prefix in pair if prefix is not None), key=_order, default=None)
        for pair in zip(one, other, strict=True)
    ]


def _order(prefix: _Prefix) -> tuple[int, tuple[int, ...], int]:
    return prefix.slowest_ns, prefix.stops, -1 if prefix.slow is None else prefix.slow


def split_micro_batches(num_micro_batches: int, paces: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Split N micro-batches into shares of at least one so that the last replica ends as early as possible.

    A pace is (fixed, each): a replica with n micro-batches takes fixed + n * each nanoseconds (each >= 1).
    Exact; ties give more to the first replicas. Raises `ValueError` when there are more replicas than
    micro-batches.
    """
    if not 1 <= len(paces) <= num_micro_batches:
        raise ValueError(f"{len(paces)} replicas for {num_micro_batches} micro-batches")
    alike = Counter(paces)
    slowest_ns = max(fixed_ns + num_micro_batches * each_ns for fixed_ns, each_ns in alike)

    def num_done(end_ns: int) -> int:
        return sum(count * _done_by(end_ns, pace) for pace, count in alike.items())

    ends_ns = least(slowest_ns, lambda ns: num_done(ns) >= num_micro_batches)
    shares = [_done_by(ends_ns, pace) for pace in paces]
    extra = sum(shares) - num_micro_batches
    for number in reversed(range(len(paces))):  # replicas that end exactly then can do one less
        fixed_ns, each_ns = paces[number]
        if extra and shares[number] > 1 and fixed_ns + shares[number] * each_ns == ends_ns:
            shares[number] -= 1
            extra -= 1
    assert not extra, "a nanosecond sooner fewer would be done than there are"
    return tuple(shares)


def least(enough: int, suffices: Callable[[int], bool], precision: int = 1) -> int:
    """The least whole number > 0 that suffices, or less than `precision` more.

    All larger ones suffice, and `enough` is known to.
    """
    too_little = 0
    while enough - too_little > precision:
        middle = (too_little + enough) // 2
        if suffices(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def _done_by(end_ns: int, pace: tuple[int, int]) -> int:
    fixed_ns, each_ns = pace
    return max(1, (end_ns - fixed_ns) // each_ns)
