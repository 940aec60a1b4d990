"""The machines that a plan runs on: the calibration, and the VM and slowdown of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..pipeline.plan import Range
from .calibration.data import Calibration
from .calibration.sizes import Sizes, sizes_of

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Round to whole nanoseconds, so that sums of times do not depend on the order of adding."""
    return round(seconds * NS_PER_S)


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
        sums: dict[str, list[float]] = {}
        for name in ("forward_s", "backward_s", "input_s", "weight_s", "optimizer_s"):
            total = sums.setdefault(name, [0])
            for value in getattr(self.calibration, name):
                total.append(total[-1] + value)
        return sums

    def _total(self, name: str, span: Range) -> float:
        return self._sums[name][span.stop] - self._sums[name][span.start]

    def forward_ns(self, worker: int, span: Range) -> int:
        return self._operation_ns("forward_s", worker, span)

    def backward_ns(self, worker: int, span: Range) -> int:
        return self._operation_ns("backward_s", worker, span)

    def halves_ns(self, worker: int, span: Range) -> tuple[int, int]:
        """Of I and of W."""
        return self._operation_ns("input_s", worker, span), self._operation_ns("weight_s", worker, span)

    def _operation_ns(self, name: str, worker: int, span: Range) -> int:
        """At least 1 ns: the engine relies on every operation taking time."""
        own_s = self.calibration.operation_s
        return max(1, to_ns(self._total(name, span) * self.slowdown[worker] + own_s))

    def apply_ns(self, worker: int, span: Range) -> int:
        return to_ns(self._total("optimizer_s", span) * self.slowdown[worker])

    def backward_shares(self, span: Range, *, halves: bool = False) -> list[tuple[int, float]]:
        """[(section, fraction of the range's backward, or W, that is over when the section's is)],
        descending."""
        sums = self._sums["weight_s" if halves else "backward_s"]
        whole = sums[span.stop] - sums[span.start]
        return [
            (section, (sums[span.stop] - sums[section]) / whole if whole else 1.0)
            for section in reversed(span.sections)
        ]

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.calibration)
