"""A list of a cloud's that several ask for at about the same time: one of them asks the cloud."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedList(Generic[T]):
    """Safe to use from several threads."""

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._asking = threading.Lock()
        self._known: tuple[float, T] | None = None
        self._changes = 0
        self._failures = 0
        self._failure: Exception | None = None  # the newest

    def get(self, *, since: float) -> tuple[float, T]:
        """One that was asked for at `since` or later, and when that was. Raises what asking raised, also for
        those who waited for it: they do not ask one after another while the cloud has no answer."""
        failures = self._failures
        with self._asking:
            if self._failure is not None and self._failures != failures:
                raise self._failure
            known = self._known
            if known is not None and known[0] >= since:
                return known
            changes, now = self._changes, self._clock()
            try:
                found = (now, self._ask())
            except Exception as error:
                self._failures, self._failure = self._failures + 1, error
                raise
            self._known = found if changes == self._changes else None
            return found

    def forget(self) -> None:
        """Something was changed: what is known, and what is being asked for, may not tell it."""
        self._changes += 1
        self._known = None
