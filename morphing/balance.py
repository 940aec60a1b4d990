"""Cutting the sections into P stages so that the slowest stage is as fast as can be (Varuna §4.4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from ..pipeline import Range
from ..simulator import Calibration


def stage_seconds(calibration: Calibration, span: Range, *, recompute: bool) -> float:
    """Compute time of one micro-batch at a stage; the last stage does not recompute (§3.2)."""
    forward = sum(calibration.forward_s[span.start : span.stop])
    backward = sum(calibration.backward_s[span.start : span.stop])
    recomputes = recompute and span.stop < calibration.num_sections
    return forward * (2 if recomputes else 1) + backward


def balance(
    calibration: Calibration, max_depth: int, *, recompute: bool, fits: Callable[[Range], bool]
) -> Mapping[int, tuple[Range, ...]]:
    """For each P in 1..max_depth the split into P ranges with the least maximum, where one exists whose
    stages fit.

    Exact, by dynamic programming over (number of stages, first section after them), for any P <= K. Ties
    go to the earlier cuts, so that the answer is the same everywhere.
    """
    num_sections = calibration.num_sections
    cost = _costs(calibration, recompute, fits)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # first section left -> (maximum, stops)
    splits: dict[int, tuple[Range, ...]] = {}
    for depth in range(1, min(max_depth, num_sections) + 1):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (start, stop), seconds in cost.items():
            if start not in best:
                continue
            slowest, stops = best[start]
            found = (max(slowest, seconds), (*stops, stop))
            if stop not in longer or found < longer[stop]:
                longer[stop] = found
        if num_sections in longer:
            bounds = (0, *longer[num_sections][1])
            splits[depth] = tuple(Range(start, stop) for start, stop in itertools.pairwise(bounds))
        best = {stop: found for stop, found in longer.items() if stop < num_sections}
    return splits


def _costs(
    calibration: Calibration, recompute: bool, fits: Callable[[Range], bool]
) -> dict[tuple[int, int], float]:
    costs: dict[tuple[int, int], float] = {}
    for start in range(calibration.num_sections):
        for stop in range(start + 1, calibration.num_sections + 1):
            span = Range(start, stop)
            if fits(span):
                costs[start, stop] = stage_seconds(calibration, span, recompute=recompute)
    return costs
