"""A small event engine: a heap of (time, priority, number, event) in nanoseconds, hence a total order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Whole nanoseconds, so that sums of times do not depend on the order of adding."""
    return round(seconds * NS_PER_S)


class Engine(Generic[E]):
    """Virtual time. Events at one instant run by priority, then in the order in which they were put there."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, int, E]] = []
        self._number = 0

    def at(self, time_ns: int, event: E, *, priority: int = 0) -> None:
        """Raises `ValueError` for a time that is past."""
        if time_ns < self.now_ns:
            raise ValueError(f"time_ns: {time_ns} is before now ({self.now_ns})")
        heapq.heappush(self._heap, (time_ns, priority, self._number, event))
        self._number += 1

    def run(self, handle: Callable[[E], None]) -> None:
        """Hands each event to `handle`, which may put more, until none is left."""
        while self._heap:
            self.now_ns, _, _, event = heapq.heappop(self._heap)
            handle(event)
