"""How commands are tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Protocol, TypeVar

from ..core.commands import Command
from ..core.strikes.table import TABLE, Kind

T = TypeVar("T")
LONGEST_DELAY_S = TABLE[Kind.COMMAND].longest_s


class CommandAbandoned(Exception):
    """The result of a retried command is no longer needed."""


class Persist(Protocol):
    """Run `call` in a thread, and retry while it raises `temporary` and `wanted` (None: the job goes on).

    Each attempt holds the lock `alone`, which is free between attempts. `kind`: whose pauses are kept.
    """

    def __call__(
        self,
        job: str,
        command: Command,
        call: Callable[[], T],
        *temporary: type[Exception],
        wanted: Callable[[], bool] | None = None,
        kind: Kind = ...,
        alone: asyncio.Lock | None = None,
    ) -> Awaitable[T]: ...


def pauses(kind: Kind = Kind.COMMAND) -> Iterator[float]:
    """Seconds to wait after each failure in a row, up to a half left out at random, since many commands wait
    for one store."""
    for failures in count(1):
        pause_s = TABLE[kind].pause_s(failures)
        yield random.uniform(pause_s / 2, pause_s)
