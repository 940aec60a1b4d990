"""The manager's clock: Unix seconds that never jump."""

from __future__ import annotations

import time
from collections.abc import Callable


def _uptime() -> float:
    """Seconds that nobody sets, with those in which the machine was suspended where the system tells."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SteadyClock:
    """The wall clock's time when this was made, and the seconds that have passed since.

    Every bound of a manager's life counts in it, so that a wall clock that is set changes none of them. The
    next manager begins with the wall clock as it is then; the core begins bounds of an earlier life anew, all
    but the wait for a VM to join.
    """

    def __init__(self, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = _uptime) -> None:
        self._uptime = uptime
        self._offset = wall() - uptime()

    def __call__(self) -> float:
        return self._offset + self._uptime()
