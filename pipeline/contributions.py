"""Contributions: what each micro-batch adds to the sums of a step, and which of them a sum holds.

A step of N micro-batches over K sections is N x K contributions: (i, k) is micro-batch i's gradients of
section k's parameters, and its new values of the buffers that section k updates. A step is complete when each
has been added exactly once, by whichever worker. The parameters that are used by the same sections are summed
together, in one bucket, so sets of contributions are sets of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

WORD = (1 << 64) - 1
"""Tallies are taken modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """A set of contributions to one bucket, which the sections that use its parameters identify in any plan.

    `micro_batches[j]` has bit i set if it holds (i, sections[j]).
    """

    sections: tuple[int, ...]
    micro_batches: tuple[int, ...]

    @classmethod
    def none(cls, sections: Sequence[int]) -> Pairs:
        return cls(tuple(sections), (0,) * len(sections))

    @classmethod
    def all(cls, sections: Sequence[int], num_micro_batches: int) -> Pairs:
        return cls(tuple(sections), ((1 << num_micro_batches) - 1,) * len(sections))

    def __bool__(self) -> bool:
        return any(self.micro_batches)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self.micro_batches)

    def __contains__(self, pair: object) -> bool:
        """Whether it holds `pair`, a (micro-batch, section)."""
        return isinstance(pair, tuple) and bool(self.of_section(pair[1]) >> pair[0] & 1)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The pairs (micro-batch, section), by section."""
        for section, bits in zip(self.sections, self.micro_batches, strict=True):
            yield from ((micro_batch, section) for micro_batch in micro_batches_of(bits))

    def __or__(self, other: Pairs) -> Pairs:
        return self._paired(other, (a | b for a, b in self._both(other)))

    def __sub__(self, other: Pairs) -> Pairs:
        return self._paired(other, (a & ~b for a, b in self._both(other)))

    def __le__(self, other: Pairs) -> bool:
        """Whether `other` holds all of these."""
        return not any(a & ~b for a, b in self._both(other))

    def of_section(self, section: int) -> int:
        """The micro-batches held of a section, as bits; 0 for a section that does not use the bucket."""
        return self.micro_batches[self.sections.index(section)] if section in self.sections else 0

    def with_pair(self, micro_batch: int, section: int) -> Pairs:
        bits = list(self.micro_batches)
        bits[self.sections.index(section)] |= 1 << micro_batch
        return replace(self, micro_batches=tuple(bits))

    @property
    def tally(self) -> int:
        """The sum of a 64-bit hash of each pair, modulo 2^64.

        Tallies of disjoint sets add up to that of their union, so the sum over all hosts of a bucket shows
        whether each contribution was added exactly once, up to a chance of 2^-64.
        """
        return sum(pair_hash(micro_batch, section) for micro_batch, section in self) & WORD

    def _both(self, other: Pairs) -> Iterator[tuple[int, int]]:
        return zip(self.micro_batches, other.micro_batches, strict=True)

    def _paired(self, other: Pairs, bits: Iterable[int]) -> Pairs:
        assert self.sections == other.sections, "sets of one bucket"
        return Pairs(self.sections, tuple(bits))


def micro_batches_of(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


@lru_cache(maxsize=256)
def whole_tally(sections: tuple[int, ...], num_micro_batches: int) -> int:
    """`Pairs.tally` of all contributions to a bucket."""
    return Pairs.all(sections, num_micro_batches).tally


def pair_hash(micro_batch: int, section: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over both numbers."""
    value = ((micro_batch << 32 | section) + 0x9E3779B97F4A7C15) & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31
