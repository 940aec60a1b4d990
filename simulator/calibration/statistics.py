"""Statistics of repeated measurements: median and spread without outliers.

The rule for outliers is Hampel's, as Leys et al. recommend it ("Detecting outliers: do not use standard
deviation around the mean, use absolute deviation around the median", 2013): measurements more than
`OUTLIER_DEVIATIONS` scaled median absolute deviations from the median are dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .parsing import InvalidCalibration, expect_fields, expect_int, expect_number, join

OUTLIER_DEVIATIONS = 3.0
SCALE = 1.4826
"""The median absolute deviation times this is the standard deviation of normal measurements."""
_LEAST_DEVIATION = 0.005  # of the median: timers are not finer, and most of a few repeats may be equal
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """`median` and `spread` (scaled median absolute deviation) of `repeats` measurements, without the
    `dropped` outliers."""

    median: float
    spread: float
    repeats: int
    dropped: int

    @property
    def noise(self) -> float:
        """The spread as a fraction of the median; 0 for a figure that is 0."""
        return self.spread / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("median", "spread", "repeats", "dropped")}

    @classmethod
    def from_json(cls, value: object, name: str) -> Figure:
        """Read what `to_json` wrote, at the path `name`. Raises `InvalidCalibration`."""
        checked = expect_fields(value, name, {"median", "spread", "repeats", "dropped"}, set())
        figure = cls(
            median=expect_number(checked["median"], join(name, "median")),
            spread=expect_number(checked["spread"], join(name, "spread")),
            repeats=expect_int(checked["repeats"], join(name, "repeats"), least=1),
            dropped=expect_int(checked["dropped"], join(name, "dropped")),
        )
        if figure.dropped >= figure.repeats:
            raise InvalidCalibration(
                f"{join(name, 'dropped')}: all {figure.repeats} repeats cannot be outliers"
            )
        return figure


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
