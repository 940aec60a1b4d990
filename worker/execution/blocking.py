"""Blocking calls on helper threads, and the interrupt that wakes the compute thread.

Nothing wakes a thread inside a gloo call (see docs/transport.md), so the compute thread makes none that
block: helper threads do, and the compute thread waits for them on the condition of its generation's
`Interrupt`, or on a queue into which the interrupt puts an item when it trips. An order from the manager or a
lost peer trips the interrupt; helpers still blocked then are abandoned with their groups, and end with the
process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from .gloo import CONNECTION_LOST

T = TypeVar("T")


class Interrupted(Exception):
    """The generation is over for this worker."""


class GenerationAbandoned(Interrupted):
    """The manager closed the generation."""


class PeersLost(Interrupted):
    """Peers could not be reached; `ranks` are those known to be lost (may be empty)."""

    def __init__(self, ranks: Sequence[int], cause: BaseException | str) -> None:
        super().__init__(f"lost ranks {list(ranks)}: {cause}" if ranks else str(cause))
        self.ranks = tuple(ranks)


class Interrupt:
    """Wakes waiting threads of one generation. The first cause wins; every later wait raises it at once."""

    def __init__(self, on_lost: Callable[[], None] | None = None) -> None:
        """`on_lost` is called whenever `lost` grows."""
        self.condition = threading.Condition()
        self.lost: frozenset[int] = frozenset()
        """Ranks whose links broke, before or after the interrupt tripped."""
        self._on_lost = on_lost or (lambda: None)
        self._cause: Exception | None = None
        self._wakes: list[Callable[[], None]] = []

    def on_trip(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when the interrupt trips, or now if it has; for threads that wait on a queue."""
        with self.condition:
            if self._cause is None:
                self._wakes.append(wake)
                return
        wake()

    def trip(self, cause: Exception) -> None:
        """Wake the compute thread with `cause`: an `Interrupted`, or a helper thread's error."""
        with self.condition:
            if self._cause is None:
                self._cause = cause
            wakes, self._wakes = self._wakes, []
            self.condition.notify_all()
        for wake in wakes:
            wake()

    def lose(self, rank: int, why: Exception) -> None:
        """Note that the link to `rank` broke, and trip."""
        with self.condition:
            self.lost |= {rank}
        self.trip(PeersLost([rank], why))
        self._on_lost()

    @property
    def tripped(self) -> bool:
        return self._cause is not None

    def check(self) -> None:
        if self._cause is not None:
            raise self._cause

    def wait_for(self, predicate: Callable[[], bool], most_s: float | None = None) -> None:
        """Block until `predicate()` (evaluated under the condition) is true, or for `most_s`. Raises the
        cause if the interrupt trips first."""
        with self.condition:
            self.condition.wait_for(lambda: self._cause is not None or predicate(), most_s)
            self.check()


class Future(Generic[T]):
    """A call given to a `BlockingThread`; `done` once it has returned or failed."""

    def __init__(self, function: Callable[[], T], ranks: tuple[int, ...]) -> None:
        self.done = False
        self._function = function
        self._ranks = ranks
        self._error: Exception | None = None
        self._result: T | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except CONNECTION_LOST as error:
            self._error = PeersLost(self._ranks, error)
        except Exception as error:
            self._error = error

    def fail(self, error: Exception) -> None:
        self._error = error

    @property
    def error(self) -> Exception | None:
        return self._error

    def result(self) -> T:
        assert self.done
        if self._error is not None:
            raise self._error
        return cast(T, self._result)


class BlockingThread:
    """A daemon thread that makes blocking calls in order, so that its owner can be woken."""

    def __init__(self, name: str, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._calls: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def call(self, function: Callable[[], T], ranks: Sequence[int] = ()) -> T:
        """Run `function` on the thread and wait for it.

        Raises the interrupt's cause if it trips first. A lost connection (`CONNECTION_LOST`) inside trips it
        with `PeersLost(ranks)`; any other error is only raised here.
        """
        return self.result(self.start(function, ranks))

    def start(self, function: Callable[[], T], ranks: Sequence[int] = ()) -> Future[T]:
        """Like `call`, without waiting. A failure is raised only by `result`: a channel may know better which
        peer is lost."""
        self._interrupt.check()
        call = Future(function, tuple(ranks))
        self._calls.put(call)
        return call

    def result(self, call: Future[T]) -> T:
        """Wait for a call that was started; see `call`."""
        self._interrupt.wait_for(lambda: call.done)
        if isinstance(call.error, PeersLost):
            self._interrupt.trip(call.error)
            self._interrupt.check()
        return call.result()

    def close(self) -> None:
        """Let the thread end once it has made the calls already given."""
        self._calls.put(None)

    def _loop(self) -> None:
        lost: PeersLost | None = None
        while (call := self._calls.get()) is not None:
            if self._interrupt.tripped:
                continue
            if lost is None:
                call.run()
                lost = call.error if isinstance(call.error, PeersLost) else None
            else:
                call.fail(lost)  # peers give up as well, so this call might wait for ever
            with self._interrupt.condition:
                call.done = True
                self._interrupt.condition.notify_all()
