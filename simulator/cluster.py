"""The machines that a plan runs on: the calibration, and the VM and slowdown of each worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..pipeline.plan import Path, Range
from .calibration.data import Calibration
from .calibration.sizes import Sizes, sizes_of

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Round to whole nanoseconds, so that sums of times do not depend on the order of adding."""
    return round(seconds * NS_PER_S)


class BackwardTimes(NamedTuple):
    """Seconds of a section's part of a backward, whole or in two operations, I and W."""

    section: int
    whole_s: float
    input_s: float
    weight_s: float


@dataclass(frozen=True)
class Cluster:
    """Costs of operations and updates; `vm_of` and `slowdown` are indexed by worker.

    `starts_ns`: when each worker begins the step; empty if all begin at 0.
    """

    calibration: Calibration
    vm_of: Sequence[str]
    slowdown: Sequence[float]
    starts_ns: Sequence[int] = ()

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        names = ("forward_s", "backward_s", "input_s", "weight_s", "optimizer_s")
        return {
            name: list(itertools.accumulate(getattr(self.calibration, name), initial=0)) for name in names
        }

    def _total(self, name: str, span: Range) -> float:
        return self._sums[name][span.stop] - self._sums[name][span.start]

    def forward_ns(self, worker: int, span: Range) -> int:
        return self._operation_ns("forward_s", worker, span)

    def backward_ns(self, worker: int, span: Range, path: Path) -> int:
        if path.is_whole:
            return self._operation_ns("backward_s", worker, span)
        return self._takes_ns(sum(each.whole_s for each in self._backward(span, path)), worker)

    def halves_ns(self, worker: int, span: Range, path: Path) -> tuple[int, int]:
        """Of I and of W."""
        if path.is_whole:
            return self._operation_ns("input_s", worker, span), self._operation_ns("weight_s", worker, span)
        parts = self._backward(span, path)
        input_s, weight_s = sum(each.input_s for each in parts), sum(each.weight_s for each in parts)
        return self._takes_ns(input_s, worker), self._takes_ns(weight_s, worker)

    def _operation_ns(self, name: str, worker: int, span: Range) -> int:
        return self._takes_ns(self._total(name, span), worker)

    def _takes_ns(self, compute_s: float, worker: int) -> int:
        """At least 1 ns: the engine relies on every operation taking time."""
        return max(1, to_ns(compute_s * self.slowdown[worker] + self.calibration.operation_s))

    @cached_property
    def _backwards(self) -> dict[tuple[Range, int, frozenset[int]], Sequence[BackwardTimes]]:
        return {}

    def _backward(self, span: Range, path: Path) -> Sequence[BackwardTimes]:
        """The parts of the range's sections that a gradient reaches, descending."""
        key = span, path.open_from, path.held
        found = self._backwards.get(key)
        if found is None:
            found = self._backwards[key] = list(self._sections_backward(span, path))
        return found

    def _sections_backward(self, span: Range, path: Path) -> Iterator[BackwardTimes]:
        """See `_backward`.

        Without measured halves, each is taken for half of the backward. Nobody waits for the I of the lowest
        open section, so it has only a W (or its whole backward, if that cannot be split).
        """
        measured = self.calibration
        for section in reversed(range(max(span.start, path.open_from), span.stop)):
            whole_s = measured.backward_s[section]
            input_s, weight_s = whole_s / 2, whole_s / 2
            if measured.has_halves:
                input_s, weight_s = measured.input_s[section], measured.weight_s[section]
            if section and section == path.open_from:
                whole_s = weight_s = weight_s or whole_s
                input_s = 0.0
            if not path.adds(section):
                whole_s, weight_s = input_s if section else 0.0, 0.0
            yield BackwardTimes(section, whole_s, input_s, weight_s)

    def apply_ns(self, worker: int, span: Range) -> int:
        return to_ns(self._total("optimizer_s", span) * self.slowdown[worker])

    def backward_shares(self, span: Range, path: Path, *, halves: bool) -> list[tuple[int, float]]:
        """[(section, fraction of the range's backward, or W, that is over when the section's is)],
        descending, of the sections to whose sums the path's micro-batches add."""
        if not path.is_whole:
            return self._shares_of_rest(span, path, halves)
        sums = self._sums["weight_s" if halves else "backward_s"]
        whole = sums[span.stop] - sums[span.start]
        return [
            (section, (sums[span.stop] - sums[section]) / whole if whole else 1.0)
            for section in reversed(span.sections)
        ]

    def _shares_of_rest(self, span: Range, path: Path, halves: bool) -> list[tuple[int, float]]:
        parts = [
            (each.section, each.weight_s if halves else each.whole_s) for each in self._backward(span, path)
        ]
        ends = list(itertools.accumulate(takes_s for _, takes_s in parts))
        return [
            (section, end / ends[-1] if ends[-1] else 1.0)
            for (section, _), end in zip(parts, ends, strict=True)
            if path.adds(section)
        ]

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.calibration)

    def sizes_on(self, path: Path) -> Sizes:
        return sizes_of(self.calibration, path.open_from) if path.open_from else self.sizes
