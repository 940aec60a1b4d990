"""Chooses K-1 of many places for cuts: sections of nearly equal work, and few bytes that cross."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

_BYTES_WEIGHT = 0.01  # a cut of usual size costs as much as a section that is off the mean by a tenth
_LONGEST = 4.0  # in means: longer sections are seldom part of the best choice, so tried last
_INSIDE_WEIGHT = 0.01  # the cost of a cut inside a block, in the same unit


def best_cuts(
    places: Sequence[int],
    sizes: Mapping[int, int],
    work: Sequence[float],
    wanted: int,
    inside: Collection[int] = frozenset(),
    held: Sequence[float] | None = None,
) -> list[int]:
    """Choose `wanted`-1 of the ascending `places` with the least squared imbalance plus crossing bytes.

    Dynamic programming over the number of sections and where the last of them ends. `work`: cumulative work
    before each position, the total last; `sizes`: bytes that cross at each place; `inside`: places to avoid;
    `held`: cumulative bytes of parameters, whose imbalance then counts as much as that of work. Ties go to
    the earlier cut, so the result is deterministic.
    """
    ends = [*places, len(work) - 1]
    loads = [_Load([sums[end] for end in ends], wanted) for sums in (work, held) if sums is not None]
    usual = max(sorted(sizes[place] for place in places)[len(places) // 2], 1) if places else 1
    toll = [_BYTES_WEIGHT * sizes[p] / usual + (_INSIDE_WEIGHT if p in inside else 0.0) for p in places]
    toll.append(0.0)
    chosen = _chosen(loads, toll, wanted, _LONGEST) or _chosen(loads, toll, wanted, math.inf)
    return [ends[place] for place in chosen]


class _Load:
    """A load to balance over sections; `until` is cumulative, before each end."""

    def __init__(self, until: Sequence[float], num_sections: int) -> None:
        self.until = until
        self.mean = until[-1] / num_sections or 1.0

    def off(self, end: int, start: int | None = None) -> float:
        """The squared deviation from the mean of a section between two ends."""
        own = self.until[end] - (0.0 if start is None else self.until[start])
        return (own / self.mean - 1.0) ** 2


def _chosen(loads: Sequence[_Load], toll: Sequence[float], wanted: int, longest: float) -> list[int]:
    """Indices of the chosen ends, without the last. No section of several places exceeds `longest` means in
    all its loads; empty if that is impossible."""
    ends = range(len(toll))
    best = [sum(load.off(end) for load in loads) + toll[end] for end in ends]
    history: list[list[int]] = []
    for count in range(1, wanted):
        longer = [math.inf] * len(toll)
        before = [-1] * len(toll)
        for end in range(count, len(toll)):
            for start in range(end - 1, count - 2, -1):
                if start < end - 1 and all(
                    load.until[end] - load.until[start] > longest * load.mean for load in loads
                ):
                    break
                found = best[start] + sum(load.off(end, start) for load in loads)
                if found <= longer[end]:
                    longer[end], before[end] = found, start
            longer[end] += toll[end]
        best = longer
        history.append(before)
    if math.isinf(best[-1]):
        return []
    end = len(toll) - 1
    chosen: list[int] = []
    for before in reversed(history):
        end = before[end]
        chosen.append(end)
    return chosen[::-1]
