"""What pipelines of together so many VMs do in some time: a knapsack over templates, and a bound on it.

Pipelines of a combination may be put in any order, also in one in which the VMs of the first j are never
further from j times the average than the largest pipeline has VMs (Steinitz's lemma on a line). So only that
band is looked at: the work grows with the number of pipelines, and not with that of VMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from .templates import Template

Done = Mapping[int, tuple[int, Template]]
"""{number of VMs: (most micro-batches that a pipeline of so many does in some time, by this template)}."""
Numbers = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]
Floats = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]

_NOTHING = 0, None
_IMPOSSIBLE = -(1 << 60)
_ROW_CELLS = 5000  # what a row of the table takes however narrow it is


@dataclass(slots=True)
class Work:
    """What a search may still spend, in cells of tables: a count, so that every machine finds the same."""

    cells: float = float("inf")

    @property
    def is_used_up(self) -> bool:
        return self.cells <= 0

    def take(self, cells: int) -> bool:
        """Whether there is enough left. If not, nothing is left afterwards."""
        self.cells -= cells
        return self.cells >= 0


class Paces:
    """What templates do in a time, all of them at once: for hundreds of VMs there are thousands of bounds."""

    def __init__(self, choices: Mapping[int, Sequence[Template]]) -> None:
        """`choices`: {number of VMs: templates}."""
        self.choices = choices
        self._templates = [one for each in choices.values() for one in each]
        self._lines = numpy.array(list(itertools.chain.from_iterable(t.lines for t in self._templates))).T
        lengths = numpy.array([len(one.lines) for one in self._templates])
        self._firsts = numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]])

    def done_by(self, time_ns: int, most: int) -> Done:
        """Of each number of VMs the template that does most, at most `most`; without those that do none."""
        fixed_ns, each_ns, width, together = self._lines
        # As `_Line.done_by`. Room for more than `most` at once makes no difference, and products stay small.
        by_line = ((time_ns - fixed_ns + 1) * numpy.minimum(together, most) - 1) // each_ns * width
        numbers = numpy.minimum(numpy.minimum.reduceat(by_line, self._firsts), most)
        found: dict[int, tuple[int, Template]] = {}
        for number, template in zip(numbers.tolist(), self._templates, strict=True):
            if number > found.get(template.num_vms, _NOTHING)[0]:
                found[template.num_vms] = number, template
        return found


class Packing:
    """What a number of pipelines on at most `num_vms` VMs do at most in some time."""

    def __init__(self, done: Done, num_vms: int) -> None:
        self._done = done
        self._num_vms = num_vms
        self._widest = max(done, default=0)

    def cells(self, count: int) -> int:
        """How much work it is to know exactly what `count` pipelines do."""
        return count * (_ROW_CELLS + self._widest * (2 * self._widest + 3))

    def at_most(self, counts: int) -> Floats:
        """Of 1, ..., `counts` pipelines a bound on the micro-batches that they do: as if a pipeline could be
        between two templates. Minus infinity where there are too few VMs."""
        numbers = numpy.arange(1, counts + 1)
        if not self._done:
            return numpy.full(counts, -numpy.inf)
        sizes, done = self._corners
        average = self._num_vms / numbers
        found = numpy.interp(average, sizes, done) * numbers
        return numpy.where(average >= sizes[0], found, -numpy.inf)

    @cached_property
    def _corners(self) -> tuple[Sequence[int], Sequence[int]]:
        """(VMs, micro-batches) of the templates that no mixture of two others outdoes: the upper hull."""
        corners = list[tuple[int, int]]()
        for size, (number, _) in sorted(self._done.items()):
            if corners and number <= corners[-1][1]:
                continue
            while len(corners) > 1 and _is_below(corners[-2], corners[-1], (size, number)):
                corners.pop()
            corners.append((size, number))
        return [size for size, _ in corners], [number for _, number in corners]

    def most(self, count: int) -> int | None:
        """The most micro-batches; None where there is no way."""
        if not self._is_possible(count):
            return None
        best, _ = self._filled(count)
        return -(-best // (self._num_vms + 1))

    def members(self, count: int) -> list[tuple[int, Template]]:
        """(micro-batches, template) of each of `count` pipelines that do most, on the fewest VMs."""
        _, sizes = self._filled(count)
        taken = self._values[1]
        return [self._done[taken[size]] for size in sizes]

    def _is_possible(self, count: int) -> bool:
        return bool(self._done) and count * min(self._done) <= self._num_vms

    @cached_property
    def _values(self) -> tuple[Numbers, Sequence[int]]:
        """By VMs that a pipeline may use: the most that it is worth, and the VMs of that template.

        Worth most is what does most micro-batches, and of these what uses the fewest VMs.
        """
        values = numpy.full(self._widest + 1, _IMPOSSIBLE, dtype=numpy.int64)
        taken = [0] * (self._widest + 1)
        for size in range(1, self._widest + 1):
            values[size], taken[size] = values[size - 1], taken[size - 1]
            if size in self._done:
                value = self._done[size][0] * (self._num_vms + 1) - size
                if value > values[size]:
                    values[size], taken[size] = value, size
        return values, taken

    def _filled(self, count: int) -> tuple[int, Sequence[int]]:
        """The most that `count` pipelines are worth, and the VMs that each may use."""
        widest, values = self._widest, self._values[0][:0:-1]  # of the widest first
        num_vms = min(self._num_vms, count * widest)  # each may use VMs that it leaves idle
        middles = [number * num_vms // count for number in range(count + 1)]
        width = 2 * widest + 3  # the middle, and one more on each side for its rounding
        padded = numpy.full(width + 2 * widest, _IMPOSSIBLE, dtype=numpy.int64)
        windows = sliding_window_view(padded, widest)
        band = padded[widest : widest + width]
        band[widest + 1] = 0
        chosen = numpy.zeros((count, width), dtype=numpy.int64)
        rows = numpy.arange(width)
        for number in range(count):
            step = middles[number + 1] - middles[number]
            found = windows[step : step + width] + values
            chosen[number] = found.argmax(axis=1)
            band[:] = numpy.maximum(found[rows, chosen[number]], _IMPOSSIBLE)
        sizes, place = list[int](), widest + 1
        for number in range(count - 1, -1, -1):
            size = widest - int(chosen[number, place])
            sizes.append(size)
            place += middles[number + 1] - middles[number] - size
        return int(band[widest + 1]), sizes


def _is_below(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether the middle point is not above the line between the others."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])
