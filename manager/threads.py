"""Threads for blocking calls: each kind of call has, for each owner, a bounded number of its own.

A call that hangs (a mount that is gone, a cloud that does not answer) blocks only threads of its own kind:
the journal, other jobs' stores and other providers go on. Threads are daemons, so that a manager can end
while some of them hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_IDLE_S = 30.0  # an idle thread ends after this


class CallKind(StrEnum):
    """The kind of a call, and how many of it may run at a time for each owner (a provider, a job, a user)."""

    JOURNAL = "journal", 1  # writes, which come one after the other in any case
    HISTORY = "history", 2  # reads of the journal
    TOKENS = "tokens", 1  # one transaction after the other, as in the journal
    FILES = "files", 4  # bundles, secrets and logs
    SUBMISSION = "submission", 4  # by user: checking bundles and stores of jobs that are submitted
    PLANNING = "planning", 2  # keeps a core busy; more would only slow the event loop
    GROWTH = "growth", 1  # whether more VMs would pay; separate, so that it delays no plan
    RANKING = "ranking", 1  # of plans, for the API
    LIST_VMS = "list_vms", 1  # by provider
    OFFERS = "offers", 1  # by provider
    CHECK_WISH = "check_wish", 4  # by provider: checks of a job before it is accepted
    REQUEST_VM = "request_vm", 8  # by provider
    RELEASE_VM = "release_vm", 8  # by provider
    CONSOLE = "console", 2  # by provider: a VM's console output
    STORE = "store", 2  # by job and command

    most: int

    def __new__(cls, name: str, most: int) -> CallKind:
        kind = str.__new__(cls, name)
        kind._value_, kind.most = name, most
        return kind


class _Call(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class CallQueue:
    """Runs at most `size` calls at a time, first come first served, in threads of its own."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread. Cancelling stops waiting; a call that has begun continues."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._changed:
            self._waiting.append(_Call(call, future, loop))
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return await future

    @property
    def unused(self) -> bool:
        """Whether there is no thread and no waiting call."""
        return self._threads == 0

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                result, error = item.call(), None
            except BaseException as raised:  # passed to the caller, who awaits it
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the manager ended meanwhile, and its loop is closed
                item.loop.call_soon_threadsafe(_settle, item.future, result, error)
            del item, result, error  # so that an idle thread keeps nothing alive

    def _next(self) -> _Call | None:
        with self._changed:
            while True:
                while self._waiting:
                    item = self._waiting.popleft()
                    if not item.future.cancelled():
                        return item
                self._idle += 1
                told = self._changed.wait(_IDLE_S)
                self._idle -= 1
                if not told and not self._waiting:
                    self._threads -= 1
                    return None


class Threads:
    """The lanes of one manager. Used on its event loop."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[CallKind, str], CallQueue] = {}

    async def run(self, kind: CallKind, call: Callable[..., T], *values: Any, owner: str = "") -> T:
        """Run `call(*values)` in a thread of its kind and owner."""
        key = kind, owner
        if key not in self._lanes:
            self._lanes = {other: lane for other, lane in self._lanes.items() if not lane.unused}
            self._lanes[key] = CallQueue(f"{kind} {owner}".strip(), kind.most)
        return await self._lanes[key].run(lambda: call(*values))


async def told_when_slow(work: Coroutine[Any, Any, T], after_s: float, tell: Callable[[], None]) -> T:
    """Await `work`; call `tell` if it takes longer than `after_s`."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=after_s)
        if not done:
            tell()
        return await task
    finally:
        task.cancel()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
