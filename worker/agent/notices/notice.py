"""`Notice`, `Reading`, and the base class `Source` of all sources of notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Unanswered(Exception):
    """The source did not answer, or its answer cannot be read."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The cloud will do `action` to this VM."""

    action: str  # the cloud's own word: terminate, Preempt, ...
    left_s: float  # seconds until then, when it was read; 0 if it has begun
    id: str = ""  # distinguishes it from others of its kind; used to acknowledge it


@dataclass(frozen=True, slots=True)
class Reading:
    """A source's complete answer at one moment."""

    notice: Notice | None = None
    at_risk: bool = False


class Source:
    """Where notices come from; this one has none."""

    period_s = 3600.0  # seconds between two readings

    async def read(self) -> Reading:
        """Read the source. Raises `Unanswered`. Bounded in time, and never blocks the event loop."""
        return Reading()

    async def acknowledge(self, notice: Notice) -> None:
        """Tell the cloud, if it waits, that the VM has handed over. Raises `Unanswered`."""

    async def close(self) -> None:
        """Close what is open."""


class Countdown:
    """Counts down to the deadline of a notice.

    A cloud states a time of day, so the wall clock is read once for each notice, when it is first seen; from
    then on a monotonic clock counts.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._seen: tuple[object, float] | None = None  # (identity of the notice, its deadline)

    def left_s(self, mark: object, first_left_s: float) -> float:
        """Seconds left of the notice `mark`; it begins with `first_left_s` when first seen."""
        if self._seen is None or self._seen[0] != mark:
            self._seen = mark, self._steady() + max(0.0, first_left_s)
        return max(0.0, self._seen[1] - self._steady())
