"""How many micro-batches each replica takes, so that slow and fast replicas end together."""

from __future__ import annotations

from collections.abc import Sequence


def split_micro_batches(num_micro_batches: int, paces: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Split N micro-batches into shares of at least one so that the last replica ends as early as possible.

    A pace is (fixed, each): a replica with n micro-batches takes fixed + n * each nanoseconds (each >= 1).
    Exact; ties give more to the first replicas. Raises `ValueError` when there are more replicas than
    micro-batches.
    """
    if not 1 <= len(paces) <= num_micro_batches:
        raise ValueError(f"{len(paces)} replicas for {num_micro_batches} micro-batches")
    ends_ns = _least_end_ns(num_micro_batches, paces)
    shares = _done_by(ends_ns, paces)
    extra = sum(shares) - num_micro_batches
    for number in reversed(range(len(paces))):  # replicas that end exactly then can do one less
        fixed_ns, each_ns = paces[number]
        if extra and shares[number] > 1 and fixed_ns + shares[number] * each_ns == ends_ns:
            shares[number] -= 1
            extra -= 1
    assert not extra, "a nanosecond sooner fewer would be done than there are"
    return tuple(shares)


def _least_end_ns(num_micro_batches: int, paces: Sequence[tuple[int, int]]) -> int:
    sooner = 0
    enough = max(fixed_ns + num_micro_batches * each_ns for fixed_ns, each_ns in paces)
    while enough - sooner > 1:
        middle = (sooner + enough) // 2
        if sum(_done_by(middle, paces)) >= num_micro_batches:
            enough = middle
        else:
            sooner = middle
    return enough


def _done_by(end_ns: int, paces: Sequence[tuple[int, int]]) -> list[int]:
    return [max(1, (end_ns - fixed_ns) // each_ns) for fixed_ns, each_ns in paces]
