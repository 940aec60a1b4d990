"""Answers of a cloud that callers share: what several need at once, and what seldom changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedAnswer(Generic[T]):
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
        """(when it was requested, an answer requested at `since` or later). Raises the request's error, also
        for callers that waited for it, so that they do not ask one after another while the cloud is down."""
        failures = self._failures
        with self._asking:
            if self._failure is not None and self._failures != failures:
                raise self._failure
            known = self._known
            if known is not None and since <= known[0] <= self._clock():
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
        """Discard the answer, and the one being requested, because something was changed."""
        self._changes += 1
        self._known = None


class Cache(Generic[K, T]):
    """The answer for each key, asked for again once it is older than `seconds`. Safe to use from several
    threads."""

    def __init__(self, ask: Callable[[K], T], clock: Callable[[], float], seconds: float) -> None:
        self._ask = ask
        self._clock = clock
        self._seconds = seconds
        self._answers: dict[K, SharedAnswer[T]] = {}
        self._changing = threading.Lock()

    def get(self, key: K) -> tuple[float, T]:
        """(when it was asked, the answer). Raises what asking raises."""
        with self._changing:
            answer = self._answers.setdefault(key, SharedAnswer(lambda: self._ask(key), self._clock))
        try:
            return answer.get(since=self._clock() - self._seconds)
        except Exception:
            with self._changing:
                if self._answers.get(key) is answer:  # else another has taken its place
                    del self._answers[key]  # the error would keep its frames alive
            raise

    def forget(self, key: K) -> None:
        with self._changing:
            self._answers.pop(key, None)
