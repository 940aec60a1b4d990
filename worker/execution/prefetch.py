"""The samples of a worker's forwards, loaded before they are needed.

They are loaded on the compute thread, at moments when it would stand still: while it waits for a message, or
for the sums and the commit at the end of a step. Python's, NumPy's and torch's generators belong to the
process; a thread that loads samples beside the operations would draw from them in between (see
docs/decisions/0041-samples-are-loaded-in-idle-moments.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...model.data import Batches, Sample
from ...model.errors import UserCodeError
from ...protocol.messages import At
from ..progress import Progress

_AHEAD = 4  # micro-batches that are kept loaded, whatever their size
_AHEAD_BYTES = 4 << 20  # and more of them as long as all take no more than this: a busy stage rarely waits

SOON_S = 0.001
"""Who waits no longer loads nothing: it would keep the interpreter from the thread that ends the wait."""


class Prefetcher:
    """`micro_batches`: those whose samples this worker takes in a step, in the order of their forwards."""

    def __init__(
        self,
        batches: Batches,
        micro_batches: Sequence[int],
        ahead_bytes: int = _AHEAD_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self._batches = batches
        self._progress = progress or Progress()
        self._micro_batches = tuple(micro_batches)
        self._ahead_bytes = ahead_bytes
        self._loaded: deque[tuple[tuple[int, int], Sample]] = deque()  # those that are taken next, no gap
        self._step = self._taken = 0
        self._refused: tuple[int, int] | None = None

    def begin(self, step: int) -> None:
        """The step, or another attempt at it, begins."""
        self._step, self._taken = step, 0
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
        """Load one more micro-batch of this step or the next; False when there is none to load."""
        key = None if self._is_full() else self._upcoming(len(self._loaded))
        if key is None or key == self._refused:
            return False
        try:
            self._loaded.append((key, self._load(*key)))
        except UserCodeError:  # raised again if it is ever needed; the job may end before
            self._refused = key
            return False
        return True

    def _load(self, step: int, micro_batch: int) -> Sample:
        with self._progress.being(At.DATA):
            sample = self._batches.micro_batch(step, micro_batch)
        self._progress.samples += 1
        return sample

    def _upcoming(self, number: int) -> tuple[int, int] | None:
        """(step, micro-batch) that is taken after `number` others; None beyond the next step."""
        place, num = self._taken + number, len(self._micro_batches)
        if place < num:
            return self._step, self._micro_batches[place]
        return (self._step + 1, self._micro_batches[place - num]) if place < 2 * num else None

    def _is_full(self) -> bool:
        if len(self._loaded) < _AHEAD:
            return False
        size_bytes = sum(tensor.nbytes for tensor in self._loaded[0][1].values())
        return (len(self._loaded) + 1) * size_bytes > self._ahead_bytes
