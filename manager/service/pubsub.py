"""Live updates of jobs for all who watch them. In memory only; the journal has the history."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

Kind = Literal["status", "step", "fact", "behind"]
_MOST_FACTS = 200  # that wait for one watcher
_MOST_STEPS = 2000


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    """`fact`: a journalled fact, with its number; `step`: a committed step; `status`: a snapshot; `behind`:
    facts were left out, which the journal has."""

    kind: Kind
    data: dict[str, Any]
    sequence: int | None = None


def to_json(value: BaseModel) -> dict[str, Any]:
    """Plain JSON values; NaN and infinities become null."""
    return json.loads(value.model_dump_json())


class Subscription:
    """The queue of one watcher: the newest status, and a bounded number of facts and steps.

    Facts that are not read in time are dropped, and the watcher is told so. If steps would have to be
    dropped, the subscription ends (None): the watcher reconnects and reads what it missed.
    """

    def __init__(self, token_id: str = "") -> None:
        self.token_id = token_id
        self._status: LiveUpdate | None = None
        self._facts: deque[LiveUpdate] = deque()
        self._steps: deque[LiveUpdate] = deque()
        self._behind = False
        self._ended = False
        self._changed = asyncio.Event()

    def offer(self, update: LiveUpdate | None) -> bool:
        """Queue an update (None ends the subscription); returns whether the watcher keeps up."""
        if update is None or len(self._steps) >= _MOST_STEPS:
            self._ended = True
            self._facts.clear()
            self._steps.clear()
        elif update.kind == "status":
            self._status = update
        elif update.kind == "step":
            self._steps.append(update)
        elif self._behind or len(self._facts) >= _MOST_FACTS:
            self._facts.clear()
            self._behind = True
        else:
            self._facts.append(update)
        self._changed.set()
        return not self._ended

    async def next(self) -> LiveUpdate | None:
        while True:
            if self._ended:
                return None
            if self._behind:
                self._behind = False
                return LiveUpdate("behind", {})
            for waiting in (self._facts, self._steps):
                if waiting:
                    return waiting.popleft()
            if self._status is not None:
                status, self._status = self._status, None
                return status
            self._changed.clear()
            await self._changed.wait()


class Hub:
    """The watchers of all jobs. Runs on the manager's event loop only."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[Subscription]] = {}
        self._closed = False

    def watched(self, job: str) -> bool:
        return bool(self._watchers.get(job))

    def publish(self, job: str, update: LiveUpdate) -> None:
        watchers = self._watchers.get(job, set())
        for watcher in list(watchers):
            if not watcher.offer(update):
                watchers.discard(watcher)

    @contextmanager
    def subscribe(self, job: str, token_id: str = "") -> Generator[Subscription]:
        """Subscribe to updates of `job` from now on, with this token."""
        subscription = Subscription(token_id)
        if self._closed:
            subscription.offer(None)
        self._watchers.setdefault(job, set()).add(subscription)
        try:
            yield subscription
        finally:
            self._watchers.get(job, set()).discard(subscription)

    def token_ids(self) -> set[str]:
        """The tokens of all subscriptions."""
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
