"""How commands are tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from ..core.commands import Command

T = TypeVar("T")
_FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0


class CommandAbandoned(Exception):
    """The result of a retried command is no longer needed."""


class Persist(Protocol):
    """Run `call` in a thread, and retry while it raises `temporary` and `wanted` (None: the job goes on).

    Each attempt holds the lock `alone`, which is free between attempts.
    """

    def __call__(
        self,
        job: str,
        command: Command,
        call: Callable[[], T],
        *temporary: type[Exception],
        wanted: Callable[[], bool] | None = None,
        longest_delay_s: float = ...,
        alone: asyncio.Lock | None = None,
    ) -> Awaitable[T]: ...


def pauses(longest_s: float = LONGEST_DELAY_S) -> Iterator[float]:
    """Seconds to wait after each failure, twice as long each time; up to a half is left out at random."""
    delay_s = _FIRST_DELAY_S
    while True:
        yield random.uniform(delay_s / 2, delay_s)
        delay_s = min(2 * delay_s, longest_s)
