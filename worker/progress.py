"""A trainer's progress counters, which its beats report."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..protocol.messages import At


class ProgressCounters:
    """Counters that only grow, each incremented by one thread, and the compute thread's current activity.

    Another thread reads them without a lock; values may be slightly old. A thread of an abandoned generation
    may increment a counter beside its new owner, and the threads that read a checkpoint share one; at worst
    one of two increments is lost.
    """

    __slots__ = ("at", "loaded", "operations", "samples", "saved")

    def __init__(self) -> None:
        self.at = At.IDLE  # the compute thread's
        self.operations = 0  # of steps, and other work of the compute thread
        self.samples = 0  # micro-batches of samples loaded, by the compute thread
        self.loaded = 0  # pieces of sections copied or read, by the thread for blocking calls
        self.saved = 0  # parts of checkpoints stored, by the saver

    @property
    def count(self) -> int:
        return self.operations + self.samples + self.loaded + self.saved

    @contextmanager
    def being(self, at: At) -> Generator[None]:
        """A context in which the compute thread's activity is `at`."""
        before, self.at = self.at, at
        try:
            yield
        finally:
            self.at = before
