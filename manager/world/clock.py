"""Virtual time: a queue of what is to happen, in whole nanoseconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from ...simulator import to_ns


class Clock:
    """Jumps from one instant in which something happens to the next. What is to happen in one instant happens
    in the order in which it was asked for, so that the same questions always have the same answers.
    """

    def __init__(self, epoch_s: float) -> None:
        """`epoch_s`: what the core's clock shows when this one begins."""
        self.now_ns = 0
        self._epoch_s = epoch_s
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_asked = 0

    @property
    def now(self) -> float:
        """The core's clock, in seconds."""
        return self.shows(self.now_ns)

    def shows(self, at_ns: int) -> float:
        """What the core's clock shows at that time."""
        return self._epoch_s + at_ns / 1e9

    @property
    def next_ns(self) -> int | None:
        """When something happens next; None: nothing ever will."""
        return self._queue[0][0] if self._queue else None

    def at(self, at_ns: int, call: Callable[..., None], *values: Any) -> None:
        self._num_asked += 1
        heapq.heappush(self._queue, (at_ns, self._num_asked, call, values))

    def after(self, delay_s: float, call: Callable[..., None], *values: Any) -> None:
        self.at(self.now_ns + to_ns(delay_s), call, *values)

    def advance(self) -> None:
        """To what happens next, which then has happened."""
        self.now_ns, _, call, values = heapq.heappop(self._queue)
        call(*values)
