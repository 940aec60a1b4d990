"""How far a trainer has got, as its beats tell it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..protocol.messages import At


class Progress:
    """Counters that only grow, each added to by one thread, and what the compute thread is at.

    They are read by another thread without a lock: what is read may be a moment old, and that is all. A
    thread of a generation that was given up may add to a counter beside its new owner, and the threads that
    read a checkpoint share theirs; all that can be lost is one of two additions.
    """

    __slots__ = ("at", "loaded", "operations", "samples", "saved")

    def __init__(self) -> None:
        self.at = At.IDLE  # the compute thread's
        self.operations = 0  # of steps, and other work of the compute thread
        self.samples = 0  # micro-batches of samples loaded; the compute thread's
        self.loaded = 0  # pieces of sections copied or read; the courier's
        self.saved = 0  # parts of checkpoints stored; the saver's

    @property
    def count(self) -> int:
        return self.operations + self.samples + self.loaded + self.saved

    @contextmanager
    def being(self, at: At) -> Generator[None]:
        """While the compute thread is at this."""
        before, self.at = self.at, at
        try:
            yield
        finally:
            self.at = before
