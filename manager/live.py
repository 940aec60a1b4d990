"""Live updates: what happens to a job, handed to all who watch it. Memory only; the journal is history."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["status", "step", "fact"]
_CAPACITY = 2000


@dataclass(frozen=True, slots=True)
class Update:
    """`fact`: a journalled fact, with its number; `step`: a committed step; `status`: a snapshot."""

    kind: Kind
    data: dict[str, Any]
    sequence: int | None = None


class Subscription:
    """One watcher's queue. It ends (None) when the watcher is too slow: it reconnects and reads history."""

    def __init__(self, token_id: str = "") -> None:
        self.token_id = token_id
        self._queue: asyncio.Queue[Update | None] = asyncio.Queue(_CAPACITY + 1)

    def offer(self, update: Update | None) -> bool:
        if update is not None and self._queue.qsize() >= _CAPACITY:
            self._queue.put_nowait(None)
            return False
        self._queue.put_nowait(update)
        return True

    async def next(self) -> Update | None:
        return await self._queue.get()


class Hub:
    """The watchers of all jobs. Runs on the manager's event loop only."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[Subscription]] = {}
        self._closed = False

    def watched(self, job: str) -> bool:
        return bool(self._watchers.get(job))

    def publish(self, job: str, update: Update) -> None:
        watchers = self._watchers.get(job, set())
        for watcher in list(watchers):
            if not watcher.offer(update):
                watchers.discard(watcher)

    @contextmanager
    def subscribe(self, job: str, token_id: str = "") -> Generator[Subscription]:
        """Updates of `job` from now on, for who showed this token."""
        subscription = Subscription(token_id)
        if self._closed:
            subscription.offer(None)
        self._watchers.setdefault(job, set()).add(subscription)
        try:
            yield subscription
        finally:
            self._watchers.get(job, set()).discard(subscription)

    def token_ids(self) -> set[str]:
        """Whose tokens they are that watch anything."""
        return {watcher.token_id for watchers in self._watchers.values() for watcher in watchers}

    def end(self, token_ids: Collection[str]) -> None:
        """End the subscriptions of these tokens."""
        for watchers in self._watchers.values():
            for watcher in [watcher for watcher in watchers if watcher.token_id in token_ids]:
                watcher.offer(None)
                watchers.discard(watcher)

    def close(self) -> None:
        """End every subscription."""
        self._closed = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.offer(None)
            watchers.clear()
