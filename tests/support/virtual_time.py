"""An event loop whose time passes at once when there is nothing left to do: the same run every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting, moves `now` on. Nothing comes from outside: no thread, no socket."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self.now = now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else: nothing will ever happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, now: float) -> None:
        self._clock = _NoWaiting(now)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(work: Coroutine[Any, Any, T], now: float = 1_000_000.0) -> T:
    """What `work` returns; it began at `now`, in Unix seconds."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(now)) as runner:
        return runner.run(work)
