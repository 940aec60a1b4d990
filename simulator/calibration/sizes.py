"""What ranges of sections need of a worker's memory, from the sizes of sections in a calibration."""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from itertools import accumulate

from ...pipeline.plan import Range
from .data import Calibration


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
        self.frozen = calibration.frozen
        self.forward_peak = cache(self._forward_peak)
        self.brief_forward_peak = cache(self._brief_forward_peak)
        self.backward_peak = cache(self._backward_peak)

    def state(self, span: Range) -> int:
        """Weights, optimizer state, buffers and gradient sums."""
        return self._total("state_bytes", span)

    def kept(self, span: Range) -> int:
        """Activations between a forward, or a recomputation, and the backward; none of frozen sections."""
        return 0 if self._is_frozen(span) else self._total("activation_bytes", self.trained(span))

    def trained(self, span: Range) -> Range:
        """The sections of a range that a gradient reaches: its end, which alone is recomputed. The whole
        range where it reaches none, since then nothing is recomputed."""
        return span if self._is_frozen(span) else Range(max(span.start, self.frozen), span.stop)

    def inputs(self, span: Range) -> int:
        """What enters a range from before it: the activations of one micro-batch."""
        return self._calibration.cut_bytes[span.start - 1] if span.start else 0

    def gradients(self, span: Range) -> int:
        """What enters a range from behind it: the gradients of one micro-batch."""
        last = span.stop == self._calibration.num_sections
        return 0 if last else self._calibration.grad_cut_bytes[span.stop - 1]

    def held(self, span: Range) -> int:
        """What a micro-batch keeps from its forward to its backward in any case, beyond the inputs: samples,
        if a section takes any, and what frozen sections give to the first that is trained."""
        if self._is_frozen(span):
            return 0
        trained = self.trained(span)
        samples = max(self._column("batch_bytes")[trained.start : trained.stop])
        return samples + max(0, self._given(span) - self.inputs(span))

    def _given(self, span: Range) -> int:
        """What frozen sections of a range give to the others of it."""
        trained = self.trained(span)
        return self.inputs(trained) if span.start < trained.start else 0

    def _forward_peak(self, span: Range) -> int:
        """While a forward runs that keeps what its backward needs, beyond the inputs."""
        if self._is_frozen(span):
            return self._passing_peak(span)
        trained = self.trained(span)
        before = self._sums("activation_bytes")[trained.start]
        reach = max(self._forward_reach[trained.start : trained.stop]) - before
        return max(self._frozen_peak(span), self._given(span) + max(self.kept(span), reach))

    @cached_property
    def _forward_reach(self) -> list[int]:
        """The most that there is while a section's forward runs, had the range begun with the first."""
        peaks, kept = self._column("forward_peak_bytes"), self._sums("activation_bytes")
        return [peak + before for peak, before in zip(peaks, kept, strict=False)]

    def _brief_forward_peak(self, span: Range) -> int:
        """While a forward runs that will be recomputed, and keeps nothing but what frozen sections give."""
        return max(self._frozen_peak(span), self._given(span) + self._passing_peak(self.trained(span)))

    def _frozen_peak(self, span: Range) -> int:
        """While the frozen sections before the others of a range run."""
        first = self.trained(span).start
        return self._passing_peak(Range(span.start, first)) if span.start < first else 0

    def _passing_peak(self, span: Range) -> int:
        """While sections run of which nothing is kept."""
        peaks, activations = self._column("forward_peak_bytes"), self._calibration.activation_bytes
        first = max(peaks[span.start], activations[span.start])
        return max([first, *self._entered_peaks[span.start + 1 : span.stop]])

    @cached_property
    def _entered_peaks(self) -> list[int]:
        """What a section's forward holds at the most, with its input, where the range itself makes that."""
        peaks, activations = self._column("forward_peak_bytes"), self._calibration.activation_bytes
        cuts = (0, *self._calibration.cut_bytes)
        return [max(peak, own) + cut for peak, own, cut in zip(peaks, activations, cuts, strict=True)]

    def _backward_peak(self, span: Range) -> int:
        """While a backward runs, beyond what was there when it began; it frees section after section."""
        if self._is_frozen(span):
            return 0
        freed = self._sums("activation_bytes")[span.stop]
        return max(0, max(self._backward_reach[self.trained(span).start : span.stop]) - freed)

    @cached_property
    def _backward_reach(self) -> list[int]:
        """The most that there is while a section's backward runs, had the range begun with the first."""
        peaks, kept = self._column("backward_peak_bytes"), self._sums("activation_bytes")
        return [peak + left for peak, left in zip(peaks, kept[1:], strict=True)]

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

    def _is_frozen(self, span: Range) -> bool:
        return span.stop <= self.frozen

    def _column(self, name: str) -> tuple[int, ...]:
        if name not in self._columns:
            self._columns[name] = getattr(self._calibration, name) or (0,) * self._calibration.num_sections
        return self._columns[name]

    def _total(self, name: str, span: Range) -> int:
        sums = self._sums(name)
        return sums[span.stop] - sums[span.start]

    def _sums(self, name: str) -> list[int]:
        """Of the sections before each place."""
        if name not in self._totals:
            self._totals[name] = list(accumulate(self._column(name), initial=0))
        return self._totals[name]
