"""The samples of a worker's forwards, loaded before they are needed.

They are loaded on the compute thread, at moments when it would stand still: while it waits for a message, or
for the sums and the commit at the end of a step. Python's, NumPy's and torch's generators belong to the
process; a thread that loads samples beside the operations would draw from them in between (see
docs/decisions/0041-samples-are-loaded-in-idle-moments.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..data import Batches, Sample
from ..errors import UserCodeError

_AHEAD = 4  # micro-batches that are kept loaded


class Feed:
    """`micro_batches`: those whose samples this worker takes in a step, in the order of their forwards."""

    def __init__(self, batches: Batches, micro_batches: Sequence[int]) -> None:
        self._batches = batches
        self._micro_batches = tuple(micro_batches)
        self._loaded: dict[tuple[int, int], Sample] = {}
        self._step = self._taken = 0
        self._refused: tuple[int, int] | None = None

    def begin(self, step: int) -> None:
        """The step, or another attempt at it, begins."""
        self._step, self._taken = step, 0
        wanted = set(self._upcoming())
        self._loaded = {key: sample for key, sample in self._loaded.items() if key in wanted}

    def take(self, micro_batch: int) -> Sample:
        """The samples of the step's next micro-batch. Raises what `Batches.micro_batch` raises."""
        self._taken += 1
        loaded = self._loaded.pop((self._step, micro_batch), None)
        return self._batches.micro_batch(self._step, micro_batch) if loaded is None else loaded

    def load_ahead(self) -> bool:
        """Load one more micro-batch of this step or the next; False when there is none to load."""
        key = next((key for key in self._upcoming() if key not in self._loaded), None)
        if key is None or key == self._refused:
            return False
        try:
            self._loaded[key] = self._batches.micro_batch(*key)
        except UserCodeError:  # raised again if it is ever needed; the job may end before
            self._refused = key
            return False
        return True

    def _upcoming(self) -> Iterator[tuple[int, int]]:
        here = ((self._step, micro_batch) for micro_batch in self._micro_batches[self._taken :])
        after = ((self._step + 1, micro_batch) for micro_batch in self._micro_batches)
        return itertools.islice(itertools.chain(here, after), _AHEAD)
