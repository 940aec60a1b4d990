"""Which worker takes which place of a P×D grid."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..pipeline import Range


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker that a plan may use. `slowdown` multiplies its compute times (1.0: as calibrated)."""

    worker: str
    vm: str
    memory_bytes: int
    slowdown: float = 1.0


def select(slots: Sequence[Slot], count: int, holding: Mapping[str, Range]) -> list[Slot]:
    """The `count` workers to use, in the given order: fast ones first, then those that hold sections already.

    Slowdowns are compared to one decimal, since they are measured and must not reshuffle workers by noise.
    """
    ranked = sorted(
        range(len(slots)),
        key=lambda index: (round(slots[index].slowdown, 1), slots[index].worker not in holding, index),
    )
    return [slots[index] for index in sorted(ranked[:count])]


def place(
    slots: Sequence[Slot], stages: Sequence[Range], holding: Mapping[str, Range], weights: Sequence[int]
) -> list[Slot]:
    """The workers in rank order (rank d·P+p is stage p of replica d).

    The workers of a VM take consecutive ranks, so they are neighbours in a pipeline, and replicas of a
    section share a VM only where it has more workers than the pipeline has stages. VMs of one size are
    interchangeable: among them, and inside each, the places go to whoever holds the most of what is needed,
    by `weights` (bytes per section).
    """
    by_vm: dict[str, list[Slot]] = {}
    for slot in slots:
        by_vm.setdefault(slot.vm, []).append(slot)
    groups = sorted(by_vm.values(), key=len, reverse=True)
    starts = [0, *itertools.accumulate(len(group) for group in groups)]
    held = [tuple(holding.get(slot.worker) for slot in group) for group in groups]
    inside = _Inside(stages, weights)
    placed: dict[int, Slot] = {}
    for size in sorted({len(group) for group in groups}, reverse=True):
        alike = [index for index, group in enumerate(groups) if len(group) == size]
        wants = [starts[index] % len(stages) for index in alike]
        for left, right in _greedy_alike([held[index] for index in alike], wants, inside.worth):
            group, start = groups[alike[left]], starts[alike[right]]
            for offset, index in inside.match(held[alike[left]], wants[right]).items():
                placed[start + offset] = group[index]
    return [placed[rank] for rank in range(len(slots))]


_Held = tuple[Range | None, ...]  # what each worker of a VM holds


class _Inside:
    """How the workers of a VM divide consecutive ranks: computed once for VMs that are alike."""

    def __init__(self, stages: Sequence[Range], weights: Sequence[int]) -> None:
        self._stages = stages
        self._sums = [0, *itertools.accumulate(weights)]
        self._known: dict[tuple[_Held, int], tuple[dict[int, int], int]] = {}

    def match(self, held: _Held, start: int) -> Mapping[int, int]:
        """Offset from the first rank -> worker, when the first rank is that of stage `start`."""
        return self._solved(held, start)[0]

    def worth(self, held: _Held, start: int) -> int:
        """The bytes that stay where they are."""
        return self._solved(held, start)[1]

    def _solved(self, held: _Held, start: int) -> tuple[dict[int, int], int]:
        if (held, start) not in self._known:
            worth = {
                (index, offset): self._kept(span, (start + offset) % len(self._stages))
                for index, span in enumerate(held)
                for offset in range(len(held))
            }
            pairs = _greedy(worth)
            match = {offset: index for index, offset in pairs}
            self._known[held, start] = match, sum(worth[pair] for pair in pairs)
        return self._known[held, start]

    def _kept(self, held: Range | None, stage: int) -> int:
        wanted = self._stages[stage]
        if held is None:
            return 0
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        return self._sums[stop] - self._sums[start] if start < stop else 0


def _greedy(worth: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Pairs one with one, the most worthy first; ties in ascending order."""
    left: set[int] = set()
    right: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for pair in sorted(worth, key=lambda pair: (-worth[pair], pair)):
        if pair[0] not in left and pair[1] not in right:
            left.add(pair[0])
            right.add(pair[1])
            pairs.append(pair)
    return pairs


L = TypeVar("L", bound=Hashable)
R = TypeVar("R", bound=Hashable)


def _greedy_alike(
    lefts: Sequence[L], rights: Sequence[R], worth: Callable[[L, R], int]
) -> list[tuple[int, int]]:
    """`_greedy` for what comes in a few kinds, without a look at every pair: many workers hold few ranges."""
    kinds: dict[int, dict[L, list[R]]] = {}
    for left in dict.fromkeys(lefts):
        for right in dict.fromkeys(rights):
            kinds.setdefault(worth(left, right), {}).setdefault(left, []).append(right)
    free_left: dict[L, list[int]] = {}
    for index, left in enumerate(lefts):
        free_left.setdefault(left, []).append(index)
    free_right: dict[R, deque[int]] = {}
    for index, right in enumerate(rights):
        free_right.setdefault(right, deque()).append(index)
    pairs: list[tuple[int, int]] = []
    for _, fitting in sorted(kinds.items(), reverse=True):
        taken: set[int] = set()
        for index in sorted(index for left in fitting for index in free_left[left]):
            open_to = [queue for right in fitting[lefts[index]] if (queue := free_right[right])]
            if open_to:
                pairs.append((index, min(open_to, key=lambda queue: queue[0]).popleft()))
                taken.add(index)
        for left in fitting:
            free_left[left] = [index for index in free_left[left] if index not in taken]
    return pairs
