"""VMs of one cloud whose connections closed: gathered for a moment, then asked about once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

MOST_LOOKS = 3  # at a time: for more VMs a list costs less
SETTLE_S = 1.0  # an agent whose connection alone broke has connected anew by then
_APART_S = 4.0  # as clouds count calls


class Closings:
    """Runs on the event loop."""

    def __init__(self) -> None:
        self._jobs: dict[str, str] = {}
        self._has_any = asyncio.Event()

    def add(self, job: str, vm: str) -> None:
        """A VM's connection has closed."""
        self._jobs[vm] = job
        self._has_any.set()

    async def follow(self, look: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        """Have `look` ask about them, by VM the job of each, for ever."""
        while True:
            await self._has_any.wait()
            await asyncio.sleep(SETTLE_S)
            self._has_any.clear()
            jobs, self._jobs = self._jobs, {}
            await look(jobs)
            await asyncio.sleep(_APART_S)
