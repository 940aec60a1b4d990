"""What ranges of sections need of a worker's memory, from the sizes of sections in a calibration."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate

from ..pipeline import Range
from .calibration import Calibration


@lru_cache(maxsize=8)
def sizes_of(calibration: Calibration) -> Sizes:
    """The same object for the same calibration, with what it has answered already."""
    return Sizes(calibration)


class Sizes:
    """Bytes that a range of sections needs; answers are kept, since few ranges are asked for often."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._columns: dict[str, tuple[int, ...]] = {}
        self._totals: dict[str, list[int]] = {}
        self.forward_peak = cache(self._forward_peak)
        self.brief_forward_peak = cache(self._brief_forward_peak)
        self.backward_peak = cache(self._backward_peak)

    def state(self, span: Range) -> int:
        """Weights, optimizer state, buffers and gradient sums."""
        return self._total("state_bytes", span)

    def kept(self, span: Range) -> int:
        """From a micro-batch's forward to its backward, beyond the inputs."""
        return self._total("activation_bytes", span)

    def inputs(self, span: Range) -> int:
        """What enters a range from before it: the activations of one micro-batch."""
        return self._calibration.cut_bytes[span.start - 1] if span.start else 0

    def gradients(self, span: Range) -> int:
        """What enters a range from behind it: the gradients of one micro-batch."""
        last = span.stop == self._calibration.num_sections
        return 0 if last else self._calibration.grad_cut_bytes[span.stop - 1]

    def batch(self, span: Range) -> int:
        """A micro-batch's samples, which the range keeps if one of its sections takes any."""
        return max(self._column("batch_bytes")[span.start : span.stop])

    def _forward_peak(self, span: Range) -> int:
        """While a forward runs that keeps what its backward needs, beyond the inputs."""
        peaks, activations = self._column("forward_peak_bytes"), self._calibration.activation_bytes
        before = accumulate(activations[span.start : span.stop], initial=0)
        running = (kept + peaks[section] for section, kept in zip(span.sections, before, strict=False))
        return max(self.kept(span), *running)

    def _brief_forward_peak(self, span: Range) -> int:
        """While a forward runs that will be recomputed, and keeps nothing."""
        peaks, cuts = self._column("forward_peak_bytes"), self._calibration.cut_bytes
        activations = self._calibration.activation_bytes
        return max(
            max(peaks[section], activations[section]) + (cuts[section - 1] if section > span.start else 0)
            for section in span.sections
        )

    def _backward_peak(self, span: Range) -> int:
        """While a backward runs, beyond what was there when it began; it frees section after section."""
        peaks, activations = self._column("backward_peak_bytes"), self._calibration.activation_bytes
        freed = accumulate(reversed(activations[span.start : span.stop]), initial=0)
        return max(
            0, *(peaks[section] - gone for section, gone in zip(reversed(span.sections), freed, strict=False))
        )

    def update(self, span: Range) -> int:
        """While a step is applied, beyond the state: all gradients, and one section's update at a time."""
        reduced = self._total("reduced_bytes", span)
        return reduced + max(self._column("update_peak_bytes")[span.start : span.stop])

    def snapshot(self, hosts: list[tuple[int, int]]) -> int:
        """Of a checkpoint on its way to the store, for (section, number of its hosts): the copies, and the
        file of one section at a time, which is put together from a second copy. Both are in host memory."""
        if self._calibration.device_kind != "cpu":
            return 0
        column = self._column("snapshot_bytes")
        shares = [column[section] // number for section, number in hosts]
        return sum(shares) + 2 * max(shares, default=0)

    def _column(self, name: str) -> tuple[int, ...]:
        if name not in self._columns:
            self._columns[name] = getattr(self._calibration, name) or (0,) * self._calibration.num_sections
        return self._columns[name]

    def _total(self, name: str, span: Range) -> int:
        if name not in self._totals:
            self._totals[name] = list(accumulate(self._column(name), initial=0))
        totals = self._totals[name]
        return totals[span.stop] - totals[span.start]
