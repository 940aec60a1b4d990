"""Gathers VMs of one cloud whose connections closed, and asks the cloud about them together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

MOST_LOOKS = 3  # VMs asked for by name at a time: for more, a list is cheaper
SETTLE_S = 1.0  # by then an agent that lost only its connection has reconnected
_APART_S = 4.0  # between two queries, because clouds limit calls


class Closings:
    """VMs of one cloud whose connections closed. Runs on the event loop."""

    def __init__(self) -> None:
        self._jobs: dict[str, str] = {}
        self._has_any = asyncio.Event()

    def add(self, job: str, vm: str) -> None:
        """Note that a VM's connection has closed."""
        self._jobs[vm] = job
        self._has_any.set()

    async def follow(self, look: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        """Call `look` with {VM: job} of the closed connections, until cancelled."""
        while True:
            await self._has_any.wait()
            await asyncio.sleep(SETTLE_S)
            self._has_any.clear()
            jobs, self._jobs = self._jobs, {}
            await look(jobs)
            await asyncio.sleep(_APART_S)
