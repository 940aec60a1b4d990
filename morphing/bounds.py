"""The least time that a step can take under a plan, whatever its order: what need not be simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..pipeline import Range, Schedule
from ..simulator import COMMIT_BYTES, TALLY_BYTES, Calibration, Link, to_ns
from .stages import StageTable


class Bound:
    """Lower bounds of `simulate(...).time_s`, in nanoseconds, of pipelines of these stages.

    `slowdown` is that of each stage's worker, or less. A stage cannot begin before the first micro-batch has
    come to it, does all its work, and its last backward has to go back through the stages before it; then
    come its sums, one after the other, the commit and the optimizer. A micro-batch is in flight on a stage at
    least as long as it takes from there to the end and back, and no more than `window` are so at a time.
    """

    def __init__(
        self,
        table: StageTable,
        stages: Sequence[Range],
        *,
        recompute: bool,
        slowdown: Sequence[float] | None = None,
        window: int | None = None,
    ) -> None:
        factors = [1.0] * len(stages) if slowdown is None else slowdown
        self._table = table
        self._stages = stages
        self._lines = _lines(table, stages, factors, recompute, window is not None)
        self._window = window
        self._tails_ns = list(accumulate((line.back_ns for line in self._lines), initial=0))
        last = self._lines[-1]
        self._round_trip_ns = last.lead_ns + last.forward_ns + self._tails_ns[-1]
        """Of one micro-batch, from the first forward to the end of the last backward."""
        optimizer_s = table.calibration.optimizer_s
        self._apply_ns = max(
            to_ns(factor * sum(optimizer_s[span.start : span.stop]))
            for span, factor in zip(stages, factors, strict=True)
        )
        self._apply_ns += to_ns(table.calibration.step_s)

    def pipeline_ns(self, num_micro_batches: int) -> int:
        """Until the last backward of a pipeline that carries so many micro-batches. It grows with them."""
        least_ns = 0
        for line, tail_ns in zip(self._lines, self._tails_ns, strict=False):
            ends_ns = line.ends_ns(num_micro_batches)
            if self._window is not None:
                flights_ns = num_micro_batches * (self._round_trip_ns - line.lead_ns - tail_ns)
                ends_ns = max(ends_ns, line.lead_ns + flights_ns // self._window)
            least_ns = max(least_ns, ends_ns + tail_ns)
        return least_ns

    def pace(self, num_micro_batches: int) -> tuple[int, int]:
        """(nanoseconds that a pipeline takes whatever it carries, and for each micro-batch besides), if it
        carries about so many or more."""
        some_ns, twice_ns = (self.pipeline_ns(times * num_micro_batches) for times in (1, 2))
        each_ns = max(1, (twice_ns - some_ns) // num_micro_batches)
        return max(0, some_ns - num_micro_batches * each_ns), each_ns

    def step_ns(self, num_micro_batches: int, rings: Rings) -> int:
        """The whole step, if no pipeline carries more micro-batches."""
        return max(self.summed_ns(num_micro_batches, rings), self.pipeline_ns(num_micro_batches)) + (
            rings.commit_ns(len(self._stages)) + self._apply_ns
        )

    def summed_ns(self, num_micro_batches: int, rings: Rings) -> int:
        """Until the last gradient is summed. A worker's sums begin with the section that its last backward
        comes to first; and none begins before all losses are tallied."""
        last = self._lines[-1]
        tallied_ns = last.lead_ns + last.forward_ns * num_micro_batches + rings.tally_ns(len(self._stages))
        first_ns = self.pipeline_ns(num_micro_batches)
        latest_ns = tallied_ns
        for number, (span, line) in enumerate(zip(self._stages, self._lines, strict=True)):
            ends_ns = line.ends_ns(num_micro_batches) if number else first_ns
            all_ns = rings.sums_ns[span.stop] - rings.sums_ns[span.start]
            lowest_ns = rings.sums_ns[span.start + 1] - rings.sums_ns[span.start]
            if all_ns:
                latest_ns = max(latest_ns, ends_ns + lowest_ns, ends_ns - line.earlier_ns + all_ns)
                latest_ns = max(latest_ns, tallied_ns + all_ns)
        return latest_ns


class Rings:
    """The sums over `replicas` workers, or more, at the faster of both links."""

    def __init__(self, table: StageTable, replicas: int, num_micro_batches: int) -> None:
        self._table = table
        self._replicas = replicas
        self._tally_bytes = TALLY_BYTES * num_micro_batches
        each = {size: self._ring_ns(size, replicas) for size in set(table.calibration.gradient_bytes)}
        self.sums_ns = list(accumulate((each[size] for size in table.calibration.gradient_bytes), initial=0))
        """Of the sections before each."""

    def commit_ns(self, depth: int) -> int:
        return self._ring_ns(COMMIT_BYTES, depth * self._replicas)

    def tally_ns(self, depth: int) -> int:
        return self._ring_ns(self._tally_bytes, depth * self._replicas)

    def _ring_ns(self, size_bytes: int, ring: int) -> int:
        if ring < 2:
            return 0
        calibration = self._table.calibration
        least_s = min(link.allreduce_s(size_bytes, ring) for link in _links(calibration))
        return to_ns(least_s + calibration.collective_s)


class _Line(NamedTuple):
    """A stage's part in a step, in nanoseconds: n micro-batches end at lead + n * work - saved."""

    lead_ns: int
    """Until the first micro-batch is there."""
    work_ns: int
    saved_ns: int
    forward_ns: int
    back_ns: int
    """The stage's backward, and the gradient's way to it where there is one."""
    earlier_ns: int
    """How long before the end of a backward the gradients of the stage's last section are complete."""

    def ends_ns(self, num_micro_batches: int) -> int:
        return self.lead_ns + num_micro_batches * self.work_ns - self.saved_ns


def _lines(
    table: StageTable,
    stages: Sequence[Range],
    factors: Sequence[float],
    recompute: bool,
    windowed: bool,
) -> list[_Line]:
    calibration, lines, lead_ns = table.calibration, list[_Line](), 0
    for span, factor in zip(stages, factors, strict=True):
        whole_ns = table.forward_ns[span.stop] - table.forward_ns[span.start]
        forward_ns = round(factor * whole_ns) + table.own_ns
        backward_ns = round(factor * (table.backward_ns[span.stop] - table.backward_ns[span.start]))
        last = span.stop == table.num_sections
        rest_ns = table.backward_ns[span.stop - 1] - table.backward_ns[span.start]
        saves = table.schedule is Schedule.GPIPE and recompute
        work_ns = table.work_ns(span.start, span.stop, recompute and not (saves and windowed), factor)
        back_ns = backward_ns + table.own_ns
        if not last:
            back_ns += _message_ns(table, calibration.grad_cut_bytes[span.stop - 1])
        saved_ns = forward_ns if saves and not windowed else 0
        lines.append(
            _Line(lead_ns, work_ns, saved_ns, forward_ns, back_ns, round(factor * rest_ns) + table.own_ns)
        )
        if not last:
            lead_ns += forward_ns + _message_ns(table, calibration.cut_bytes[span.stop - 1])
    return lines


def _message_ns(table: StageTable, size_bytes: int) -> int:
    least_s = min(link.latency_s + link.occupied_s(size_bytes) for link in _links(table.calibration))
    return to_ns(least_s + table.calibration.message_s)


def _links(calibration: Calibration) -> tuple[Link, Link]:
    return calibration.inter_vm, calibration.intra_vm
