"""Statistics of repeated measurements: median and spread without outliers.

The rule for outliers is Hampel's, as Leys et al. recommend it ("Detecting outliers: do not use standard
deviation around the mean, use absolute deviation around the median", 2013): measurements more than
`OUTLIER_DEVIATIONS` scaled median absolute deviations from the median are dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from ..validation import Count, FieldFaults, NotNegative, PositiveCount
from .data import Record

OUTLIER_DEVIATIONS = 3.0
SCALE = 1.4826
"""The median absolute deviation times this is the standard deviation of normal measurements."""
_LEAST_DEVIATION = 0.005  # of the median: timers are not finer, and most of a few repeats may be equal
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Figure(Record):
    """`median` and `spread` (scaled median absolute deviation) of `repeats` measurements, without the
    `dropped` outliers."""

    median: NotNegative
    spread: NotNegative
    repeats: PositiveCount
    dropped: Count

    @property
    def noise(self) -> float:
        """The spread as a fraction of the median; 0 for a figure that is 0."""
        return self.spread / self.median if self.median else 0.0

    @model_validator(mode="after")
    def _has_a_measurement_left(self) -> Self:
        if self.dropped >= self.repeats:
            raise FieldFaults([("dropped", f"all {self.repeats} repeats cannot be outliers")])
        return self


def summarise(measurements: Sequence[float]) -> Figure:
    """The figure of `measurements` (at least one); see the module for the rule."""
    middle = statistics.median(measurements)
    deviation = max(_deviation(measurements, middle), _LEAST_DEVIATION * abs(middle))
    kept = [value for value in measurements if abs(value - middle) <= OUTLIER_DEVIATIONS * deviation]
    median = statistics.median(kept)
    return Figure(
        median=_rounded(median),
        spread=_rounded(_deviation(kept, median)),
        repeats=len(measurements),
        dropped=len(measurements) - len(kept),
    )


def _deviation(values: Sequence[float], middle: float) -> float:
    return SCALE * statistics.median(abs(value - middle) for value in values)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
