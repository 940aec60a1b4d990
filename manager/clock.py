"""The manager's clock: Unix seconds that do not jump when the wall clock is set."""

from __future__ import annotations

import time
from collections.abc import Callable


def _uptime() -> float:
    """Monotonic seconds, including those in which the machine was suspended where the system counts them."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SteadyClock:
    """The wall clock's time when this was made, plus the monotonic seconds since.

    All bounds of a manager count in it, so that setting the wall clock changes none of them. After a restart
    the next manager starts from the wall clock as it is then, and the core restarts all bounds except the
    wait for a VM to join.
    """

    def __init__(self, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = _uptime) -> None:
        self._uptime = uptime
        self._offset = wall() - uptime()

    def __call__(self) -> float:
        return self._offset + self._uptime()
