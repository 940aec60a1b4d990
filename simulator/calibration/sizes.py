"""Memory of ranges of sections on a worker, from the sizes of sections in a calibration."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import accumulate

from ...pipeline.plan import Range
from .data import Calibration


@lru_cache(maxsize=64)
def sizes_of(calibration: Calibration, open_from: int = 0) -> Sizes:
    """Cached, so that its memo is shared by users of one calibration."""
    return Sizes(calibration, open_from)


class Sizes:
    """Bytes that a range of sections needs. Gradients reach no section below `open_from` (see `Path`)."""

    def __init__(self, calibration: Calibration, open_from: int = 0) -> None:
        self._calibration = calibration
        self._totals: dict[str, list[int]] = {}
        self.num_sections = calibration.num_sections
        self.frozen = max(calibration.frozen, open_from)

    def state(self, span: Range) -> int:
        """Weights, optimizer state, buffers and gradient sums."""
        return self._total("state_bytes", span)

    def kept(self, span: Range) -> int:
        """Activations kept from a forward (or recomputation) to the backward; frozen sections keep none."""
        return 0 if self._is_frozen(span) else self._total("activation_bytes", self.trained(span))

    def trained(self, span: Range) -> Range:
        """The last sections of a range, which a gradient reaches and which alone are recomputed. The whole
        range if no gradient reaches it, since then nothing is recomputed."""
        if span.start >= self.frozen or self._is_frozen(span):
            return span
        return Range(self.frozen, span.stop)

    def inputs(self, span: Range) -> int:
        """Activations of one micro-batch that enter the range from the section before."""
        return self._calibration.cut_bytes[span.start - 1] if span.start else 0

    def gradients(self, span: Range) -> int:
        """Gradients of one micro-batch that enter the range from the section after."""
        last = span.stop == self.num_sections
        return 0 if last or self._is_frozen(span) else self._calibration.grad_cut_bytes[span.stop - 1]

    def held(self, span: Range) -> int:
        """What a micro-batch keeps from forward to backward even with recomputation, beyond the inputs:
        samples, if a section takes any, and outputs of frozen sections to the first trained one."""
        if self._is_frozen(span):
            return 0
        trained = self.trained(span)
        samples = max(self._column("batch_bytes")[trained.start : trained.stop])
        return samples + max(0, self._given(span) - self.inputs(span))

    def _given(self, span: Range) -> int:
        """Outputs of the range's frozen sections to its trained ones."""
        trained = self.trained(span)
        return self.inputs(trained) if span.start < trained.start else 0

    def forward_peak(self, span: Range) -> int:
        """Peak of a forward that keeps what its backward needs, beyond the inputs."""
        if self._is_frozen(span):
            return self._passing_peak(span)
        trained = self.trained(span)
        before = self._sums("activation_bytes")[trained.start]
        reach = max(self._forward_reach[trained.start : trained.stop]) - before
        return max(self._frozen_peak(span), self._given(span) + max(self.kept(span), reach))

    @cached_property
    def _forward_reach(self) -> list[int]:
        """Entry k: peak while section k's forward runs, in a range that begins with section 0."""
        peaks, kept = self._column("forward_peak_bytes"), self._sums("activation_bytes")
        return [peak + before for peak, before in zip(peaks, kept, strict=False)]

    def brief_forward_peak(self, span: Range) -> int:
        """Peak of a forward that will be recomputed, and keeps only the outputs of frozen sections."""
        return max(self._frozen_peak(span), self._given(span) + self._passing_peak(self.trained(span)))

    def _frozen_peak(self, span: Range) -> int:
        """Peak while the range's frozen sections run."""
        first = self.trained(span).start
        return self._passing_peak(Range(span.start, first)) if span.start < first else 0

    def _passing_peak(self, span: Range) -> int:
        """Peak while sections run that keep nothing."""
        peaks, activations = self._column("forward_peak_bytes"), self._calibration.activation_bytes
        first = max(peaks[span.start], activations[span.start])
        return max([first, *self._entered_peaks[span.start + 1 : span.stop]])

    @cached_property
    def _entered_peaks(self) -> list[int]:
        """Entry k: peak of section k's forward, with its input if another section of the range made that."""
        peaks, activations = self._column("forward_peak_bytes"), self._calibration.activation_bytes
        cuts = (0, *self._calibration.cut_bytes)
        return [max(peak, own) + cut for peak, own, cut in zip(peaks, activations, cuts, strict=True)]

    def backward_peak(self, span: Range) -> int:
        """Peak of a backward, beyond what was there when it began; it frees section after section."""
        if self._is_frozen(span):
            return 0
        freed = self._sums("activation_bytes")[span.stop]
        return max(0, max(self._backward_reach[self.trained(span).start : span.stop]) - freed)

    @cached_property
    def _backward_reach(self) -> list[int]:
        """Entry k: peak while section k's backward runs, in a range that begins with section 0."""
        peaks, kept = self._column("backward_peak_bytes"), self._sums("activation_bytes")
        return [peak + left for peak, left in zip(peaks, kept[1:], strict=True)]

    def pending(self, span: Range) -> int:
        """What a micro-batch keeps between its I and its W, beyond its activations."""
        return 0 if self._is_frozen(span) else self._total("pending_bytes", self.trained(span))

    def input_peak(self, span: Range) -> int:
        """Peak of an I, which frees nothing."""
        return self.pending(span) + self.weight_peak(span)

    def weight_peak(self, span: Range) -> int:
        """Peak of a W, beyond what was there when it began."""
        return max(self._column("backward_peak_bytes")[self.trained(span).start : span.stop])

    def update(self, span: Range) -> int:
        """Peak while a step is applied, beyond the state: all gradients, and one section's update."""
        reduced = self._total("reduced_bytes", span)
        return reduced + max(self._column("update_peak_bytes")[span.start : span.stop])

    def snapshot(self, hosts: list[tuple[int, int]]) -> int:
        """A checkpoint on its way to the store, for [(section, number of its hosts)], in host memory: the
        copies, and the file of one section at a time, which is a second copy."""
        if self._calibration.device_kind != "cpu":
            return 0
        column = self._column("snapshot_bytes")
        shares = [column[section] // number for section, number in hosts]
        return sum(shares) + max(shares, default=0)

    def _is_frozen(self, span: Range) -> bool:
        return span.stop <= self.frozen

    def _column(self, name: str) -> tuple[int, ...]:
        return getattr(self._calibration, name) or (0,) * self.num_sections

    def _total(self, name: str, span: Range) -> int:
        sums = self._sums(name)
        return sums[span.stop] - sums[span.start]

    def _sums(self, name: str) -> list[int]:
        """Entry k: the total of the sections before k."""
        if name not in self._totals:
            self._totals[name] = list(accumulate(self._column(name), initial=0))
        return self._totals[name]
