"""The best K-1 of many places for a cut: sections of nearly equal work, and little that crosses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

_BYTES_WEIGHT = 0.01  # what a cut of the usual size costs, against a section that is off the mean by a tenth
_LONGEST = 4.0  # means: a longer section than that is seldom part of the best choice, so looked at last
_INSIDE_WEIGHT = 0.01  # likewise for a cut inside a block


def best_cuts(
    places: Sequence[int],
    sizes: Mapping[int, int],
    work: Sequence[float],
    wanted: int,
    inside: Collection[int] = frozenset(),
) -> list[int]:
    """The `wanted`-1 of the ascending `places` with the least sum of squared imbalance and of crossing bytes
    (dynamic programme over the number of sections and where the last of them ends).

    `work`: of all before each position, the whole at the end; `inside`: places that are better avoided.
    Ties go to the earlier cut, so that the answer is the same everywhere.
    """
    ends = [*places, len(work) - 1]
    until = [work[end] for end in ends]
    mean = work[-1] / wanted or 1.0
    usual = max(sorted(sizes[place] for place in places)[len(places) // 2], 1) if places else 1
    toll = [_BYTES_WEIGHT * sizes[p] / usual + (_INSIDE_WEIGHT if p in inside else 0.0) for p in places]
    toll.append(0.0)
    chosen = _chosen(until, toll, mean, wanted, _LONGEST * mean) or _chosen(
        until, toll, mean, wanted, math.inf
    )
    return [ends[place] for place in chosen]


def _chosen(
    until: Sequence[float], toll: Sequence[float], mean: float, wanted: int, longest: float
) -> list[int]:
    """Indices of the chosen ends, without the last. No section of several places does more work than
    `longest`; empty if that leaves no way."""
    best = [_off(done, mean) + paid for done, paid in zip(until, toll, strict=True)]
    history: list[list[int]] = []
    for count in range(1, wanted):
        longer = [math.inf] * len(until)
        before = [-1] * len(until)
        for end in range(count, len(until)):
            for start in range(end - 1, count - 2, -1):
                work = until[end] - until[start]
                if work > longest and start < end - 1:
                    break
                found = best[start] + _off(work, mean)
                if found <= longer[end]:
                    longer[end], before[end] = found, start
            longer[end] += toll[end]
        best = longer
        history.append(before)
    if math.isinf(best[-1]):
        return []
    end = len(until) - 1
    chosen: list[int] = []
    for before in reversed(history):
        end = before[end]
        chosen.append(end)
    return chosen[::-1]


def _off(work: float, mean: float) -> float:
    return (work / mean - 1.0) ** 2
