"""How likely a loss of VMs leaves each section a host, where sections share some of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import add, mul


def sparing_of_few(sets: Sequence[Set[str]], most: int) -> list[float]:
    """How many losses of 0, 1, ... `most` of the VMs in `sets` take all of none of the sets. Exact."""
    none: list[float] = [1, *[0] * most]  # whole numbers remain such
    return _sparing(sets, none, lose=lambda ways: [0, *ways[:-1]], keep=lambda ways: ways)


def sparing_of_more(sets: Sequence[Set[str]], sizes: Sequence[float], num_vms: int) -> list[float]:
    """About how likely a loss of each of these sizes takes all of none of the sets, as if each VM were lost
    independently."""
    if not sizes:
        return []
    lost = [size / num_vms for size in sizes]
    kept = [1.0 - part for part in lost]
    return _sparing(
        sets,
        [1.0] * len(sizes),
        lose=lambda chances: [*map(mul, chances, lost)],
        keep=lambda chances: [*map(mul, chances, kept)],
    )


def _sparing(
    sets: Sequence[Set[str]],
    none: list[float],
    lose: Callable[[list[float]], list[float]],
    keep: Callable[[list[float]], list[float]],
) -> list[float]:
    """The sum over all losses that take all of none of the sets, of `none` changed by each VM that is lost or
    kept.

    The sets are gone through in order. What is lost is remembered only of VMs that later sets have as well:
    of sections in their order, those are few. It takes time in 2^`width(sets)`.
    """
    last = {vm: place for place, one in enumerate(sets) for vm in one}
    found: dict[frozenset[str], list[float]] = {frozenset(): none}
    known = set[str]()
    for place, one in enumerate(sets):
        for vm in sorted(one - known):
            without = {lost: keep(numbers) for lost, numbers in found.items()}
            found = without | {lost | {vm}: lose(numbers) for lost, numbers in found.items()}
        known |= one
        over = {vm for vm in one if last[vm] == place}
        merged: dict[frozenset[str], list[float]] = {}
        for lost, numbers in found.items():
            if not one <= lost:
                before = merged.get(lost - over)
                merged[lost - over] = numbers if before is None else [*map(add, before, numbers)]
        found = merged
    (spared,) = found.values()
    return spared


def width(sets: Sequence[Set[str]]) -> int:
    """The most VMs of which `_sparing` remembers at once whether they are lost."""
    last = {vm: place for place, one in enumerate(sets) for vm in one}
    first = {vm: place for place, one in reversed([*enumerate(sets)]) for vm in one}
    return max(sum(first[vm] <= place <= last[vm] for vm in last) for place in range(len(sets)))
