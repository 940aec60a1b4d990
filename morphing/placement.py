"""Placement: which worker takes which rank of a P×D grid."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import TypeVar

from ..pipeline import Range
from .assignment import cheapest

_FEW = 64  # VMs that are assigned exactly, in time that grows with the cube of their number


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker that a plan may use. `slowdown` multiplies its compute times (1.0: as calibrated)."""

    worker: str
    vm: str
    memory_bytes: int
    slowdown: float = 1.0


def speed_class(slot: Slot) -> float:
    """The slowdown to one decimal, so that noise in its measurement does not reshuffle workers."""
    return round(slot.slowdown, 1)


class Roster:
    """Workers in the order in which plans use them: fast ones first, of these those that hold sections
    already, then as given."""

    def __init__(self, slots: Sequence[Slot], holding: Mapping[str, Range]) -> None:
        self._slots = slots
        self._order = sorted(
            range(len(slots)),
            key=lambda index: (speed_class(slots[index]), slots[index].worker not in holding, index),
        )
        ordered = [slots[index] for index in self._order]
        self.ordered: Sequence[Slot] = ordered
        self._memory_bytes = list(itertools.accumulate((slot.memory_bytes for slot in ordered), min))
        self._slowdown = list(itertools.accumulate((slot.slowdown for slot in ordered), max))
        self.fastest = min(slot.slowdown for slot in slots)
        self.num_fast = sum(speed_class(slot) == speed_class(ordered[0]) for slot in ordered)
        """Number of workers in the first one's speed class."""

    def __len__(self) -> int:
        return len(self._slots)

    def used(self, count: int) -> list[Slot]:
        """The first `count` workers, in the order in which they were given."""
        return [self._slots[index] for index in sorted(self._order[:count])]

    def memory_bytes(self, count: int) -> int:
        """The least memory among the first `count`."""
        return self._memory_bytes[count - 1]

    def slowdown(self, count: int) -> float:
        """The largest slowdown among the first `count`."""
        return self._slowdown[count - 1]


def place(
    slots: Sequence[Slot],
    stages: Sequence[Range],
    holding: Mapping[str, Range],
    weights: Sequence[int],
    *,
    slow: int | None = None,
) -> list[Slot]:
    """Order the workers by rank (rank d·P+p is stage p of replica d).

    The workers of a VM take consecutive ranks, so they are neighbours in a pipeline, and replicas of a
    section share a VM only where it has more workers than the pipeline has stages. VMs with slow workers
    come last, and slow workers last in their VM, so that few pipelines have them; or, where `slow` names a
    stage, the slowest workers take that stage in every pipeline. VMs of one size and speed are
    interchangeable: among them, and inside each, a place goes to the worker that holds most of the bytes that
    it needs, by `weights` (bytes per section).
    """
    depth, ranks = len(stages), range(len(slots))
    spans = [stages[rank % depth] for rank in ranks]
    if slow is None:
        return place_in(spans, slots, holding, weights)
    inside = _Inside(spans, weights)
    by_speed = sorted(slots, key=speed_class)
    num_fast = len(slots) - len(slots) // depth
    placed = _filled(
        by_speed[:num_fast],
        [rank for rank in ranks if rank % depth != slow],
        holding,
        inside,
    ) | _filled(by_speed[num_fast:], ranks[slow::depth], holding, inside)
    return [placed[rank] for rank in ranks]


def place_in(
    spans: Sequence[Range], slots: Sequence[Slot], holding: Mapping[str, Range], weights: Sequence[int]
) -> list[Slot]:
    """Order the workers by rank, as `place` does, where rank r hosts `spans[r]`."""
    placed = _filled(sorted(slots, key=speed_class), range(len(spans)), holding, _Inside(spans, weights))
    return [placed[rank] for rank in range(len(spans))]


def _filled(
    slots: Sequence[Slot], ranks: Sequence[int], holding: Mapping[str, Range], inside: _Inside
) -> dict[int, Slot]:
    """Fill the given ranks with workers, one VM after another."""
    if not holding and len({slot.vm for slot in slots}) == len(slots):
        return dict(zip(ranks, slots, strict=True))  # nothing is kept, and nothing lies together
    by_vm: dict[str, list[Slot]] = {}
    for slot in slots:
        by_vm.setdefault(slot.vm, []).append(slot)
    by_kind = sorted(((_kind(group), group) for group in by_vm.values()), key=itemgetter(0))
    groups = [group for _, group in by_kind]
    if not holding:
        return dict(zip(ranks, itertools.chain.from_iterable(groups), strict=True))
    starts = list(itertools.accumulate((len(group) for group in groups), initial=0))
    placed: dict[int, Slot] = {}
    numbers = range(len(groups))
    for _, alike in itertools.groupby(numbers, key=lambda number: by_kind[number][0]):
        members = list(alike)
        places = [ranks[starts[number] : starts[number + 1]] for number in members]
        wants = [inside.spans_of(taken) for taken in places]
        held = [tuple(holding.get(slot.worker) for slot in groups[number]) for number in members]
        for left, right in _pairs(held, wants, inside):
            group = groups[members[left]]
            for offset, index in inside.match(held[left], wants[right]).items():
                placed[places[right][offset]] = group[index]
    return placed


def _kind(group: Sequence[Slot]) -> tuple[float, int, list[float]]:
    """A sort key that is equal for interchangeable VMs; slow ones sort last, then small ones."""
    speeds = sorted(map(speed_class, group))
    return speeds[-1], -len(group), speeds


_Held = tuple[Range | None, ...]  # what each worker of a VM holds


_Wanted = tuple[Range, ...]  # what consecutive ranks host


class _Inside:
    """Assigns the workers of a VM to its consecutive ranks; memoised, because many VMs are alike."""

    def __init__(self, spans: Sequence[Range], weights: Sequence[int]) -> None:
        self._spans = spans
        self._sums = [0, *itertools.accumulate(weights)]
        self._solved = cache(self._solve)

    def spans_of(self, ranks: Sequence[int]) -> _Wanted:
        return tuple(self._spans[rank] for rank in ranks)

    def match(self, held: _Held, wanted: _Wanted) -> Mapping[int, int]:
        """{place among the ranks: index of the worker}."""
        return self._solved(held, wanted)[0]

    def worth(self, held: _Held, wanted: _Wanted) -> int:
        """The bytes that need not move."""
        return self._solved(held, wanted)[1]

    def lacking(self, held: _Held, wanted: _Wanted) -> int:
        """The bytes that must move."""
        needed = sum(self._sums[own.stop] - self._sums[own.start] for own in wanted)
        return needed - self.worth(held, wanted)

    def _solve(self, held: _Held, wanted: _Wanted) -> tuple[dict[int, int], int]:
        pairs = _greedy(held, wanted, self._kept)
        worth = sum(self._kept(held[index], wanted[offset]) for index, offset in pairs)
        return {offset: index for index, offset in pairs}, worth

    def _kept(self, held: Range | None, wanted: Range) -> int:
        if held is None:
            return 0
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        return self._sums[stop] - self._sums[start] if start < stop else 0


def _pairs(held: Sequence[_Held], wants: Sequence[_Wanted], inside: _Inside) -> list[tuple[int, int]]:
    """Which VM takes which place, so that the fewest bytes move.

    A VM that holds exactly what a place needs may as well take it: what another would keep there, it keeps
    elsewhere. The other VMs are assigned exactly if they are few, else greedily.
    """
    free: dict[_Held, deque[int]] = {own: deque(places) for own, places in _indices(wants).items()}
    pairs = list[tuple[int, int]]()
    for index, own in enumerate(held):
        if free.get(own):
            pairs.append((index, free[own].popleft()))
    taken = {index for index, _ in pairs}
    lefts = [index for index in range(len(held)) if index not in taken]
    rights = sorted(place for places in free.values() for place in places)
    if len(lefts) <= _FEW:
        places = cheapest([[inside.lacking(held[left], wants[right]) for right in rights] for left in lefts])
        found = list(enumerate(places))
    else:
        found = _greedy([held[n] for n in lefts], [wants[n] for n in rights], inside.worth)
    return [*pairs, *((lefts[left], rights[right]) for left, right in found)]


L = TypeVar("L", bound=Hashable)
R = TypeVar("R", bound=Hashable)


def _greedy(lefts: Sequence[L], rights: Sequence[R], worth: Callable[[L, R], int]) -> list[tuple[int, int]]:
    """Greedy one-to-one matching, the pairs of most worth first; ties in ascending order. Takes pairs of
    kinds, not of items: these are many and of few kinds."""
    free_left = _indices(lefts)
    free_right = {right: deque(indices) for right, indices in _indices(rights).items()}
    kinds: dict[int, dict[L, list[deque[int]]]] = {}
    for left in free_left:
        for right, queue in free_right.items():
            kinds.setdefault(worth(left, right), {}).setdefault(left, []).append(queue)
    pairs: list[tuple[int, int]] = []
    most = min(len(lefts), len(rights))
    for _, fitting in sorted(kinds.items(), reverse=True):
        if len(pairs) == most:
            break
        open_to = [(index, queues) for left, queues in fitting.items() for index in free_left[left]]
        taken: set[int] = set()
        for index, queues in sorted(open_to, key=itemgetter(0)):
            queue = min((queue for queue in queues if queue), key=itemgetter(0), default=None)
            if queue is not None:
                pairs.append((index, queue.popleft()))
                taken.add(index)
        for left in fitting:
            free_left[left] = [index for index in free_left[left] if index not in taken]
    return pairs


def _indices(kinds: Iterable[L]) -> dict[L, list[int]]:
    """{kind: the indices at which it occurs}, in order of first occurrence."""
    found: dict[L, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return found
