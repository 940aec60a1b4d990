"""What a source of notices says, and the contract that all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Unanswered(Exception):
    """The source could not be asked now, or what it said cannot be read."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The cloud will do `action` to this VM."""

    action: str  # the cloud's own word: terminate, Preempt, ...
    left_s: float  # until then, when it was read; 0 if it has begun
    id: str = ""  # by which it is told from others of its kind, and acknowledged


@dataclass(frozen=True, slots=True)
class Reading:
    """All that a source says at one moment."""

    notice: Notice | None = None
    at_risk: bool = False


class Source(Protocol):
    period_s: float
    """Between two readings."""

    async def read(self) -> Reading:
        """Raises `Unanswered`. Bounded in time, and never blocks the event loop."""
        ...

    async def acknowledge(self, notice: Notice) -> None:
        """Tell the cloud that the VM has handed over and need not be waited for. Raises `Unanswered`."""
        ...

    async def close(self) -> None: ...


class Countdown:
    """Until the deadline of a notice.

    A cloud writes a time of day, so the wall clock is asked once for each notice, when it is first seen; from
    then on it counts down by a clock that nobody sets.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._seen: tuple[object, float] | None = None  # what tells the notice from others, and its end

    def left_s(self, mark: object, first_left_s: float) -> float:
        """Seconds left of the notice `mark`, which had `first_left_s` if it is seen for the first time."""
        if self._seen is None or self._seen[0] != mark:
            self._seen = mark, self._steady() + max(0.0, first_left_s)
        return max(0.0, self._seen[1] - self._steady())
