"""Prefetches the samples of a worker's forwards.

They are loaded on the compute thread while it would be idle: while it waits for a message, or for the
all-reduces and the commit at the end of a step. Python's, NumPy's and torch's generators belong to the
process, so a separate thread that loads samples would draw from them between operations (see
docs/decisions/0041-samples-are-loaded-in-idle-moments.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...model.data import Batches, Sample
from ...model.errors import UserCodeError
from ...protocol.messages import At
from ..progress import ProgressCounters

_AHEAD = 4  # micro-batches kept loaded, whatever their size
_AHEAD_BYTES = 4 << 20  # and more, as long as all take at most this: a busy stage is rarely idle

SOON_S = 0.001
"""Waits shorter than this load nothing, because loading would delay the thread that ends the wait."""


class Prefetcher:
    """Loads micro-batches ahead, in the order of their forwards."""

    def __init__(
        self,
        batches: Batches,
        ahead_bytes: int = _AHEAD_BYTES,
        progress: ProgressCounters | None = None,
    ) -> None:
        self._batches = batches
        self._progress = progress or ProgressCounters()
        self._now: Sequence[int] = ()
        self._then: Sequence[int] = ()
        self._ahead_bytes = ahead_bytes
        self._loaded: deque[tuple[tuple[int, int], Sample]] = deque()  # the next ones to take, without gaps
        self._step = self._taken = 0
        self._refused: tuple[int, int] | None = None

    def begin(self, step: int, micro_batches: Sequence[int], then: Sequence[int]) -> None:
        """Begin the step, or another attempt at it. This worker needs the samples of `micro_batches`, in the
        order of their forwards, and those of `then` in the next step."""
        self._step, self._taken, self._now, self._then = step, 0, micro_batches, then
        if self._loaded and self._loaded[0][0] != self._upcoming(0):
            self._loaded.clear()

    def take(self, micro_batch: int) -> Sample:
        """The samples of the step's next micro-batch. Raises what `Batches.micro_batch` raises."""
        self._taken += 1
        if self._loaded:
            key, sample = self._loaded.popleft()
            assert key == (self._step, micro_batch), "micro-batches are taken in the order of their forwards"
            return sample
        return self._load(self._step, micro_batch)

    def load_ahead(self) -> bool:
        """Load one more micro-batch of this step or the next; False if there is none to load."""
        key = None if self._is_full() else self._upcoming(len(self._loaded))
        if key is None or key == self._refused:
            return False
        try:
            self._loaded.append((key, self._load(*key)))
        except UserCodeError:  # raised again by `take`, if it is ever needed
            self._refused = key
            return False
        return True

    def _load(self, step: int, micro_batch: int) -> Sample:
        with self._progress.being(At.DATA):
            sample = self._batches.micro_batch(step, micro_batch)
        self._progress.samples += 1
        return sample

    def _upcoming(self, number: int) -> tuple[int, int] | None:
        """The (step, micro-batch) to be taken after `number` others; None beyond the next step."""
        place = self._taken + number
        if place < len(self._now):
            return self._step, self._now[place]
        place -= len(self._now)
        return (self._step + 1, self._then[place]) if place < len(self._then) else None

    def _is_full(self) -> bool:
        if len(self._loaded) < _AHEAD:
            return False
        size_bytes = sum(tensor.nbytes for tensor in self._loaded[0][1].values())
        return (len(self._loaded) + 1) * size_bytes > self._ahead_bytes
