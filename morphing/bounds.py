"""Lower bounds on the time of a step under a plan, whatever its order; they save simulations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from ..pipeline import Range
from ..simulator import COMMIT_BYTES, LOSS_ALLREDUCE_BYTES, to_ns
from .stages import Mode, StageTable


class Bound:
    """Lower bounds of `simulate(...).time_s`, in nanoseconds, for pipelines of these stages.

    `slowdown` is that of each stage's worker, or less. A stage begins once the first micro-batch has reached
    it, does all its work, and its last backward passes back through the stages before it; then come its
    all-reduces, one after the other, the commit and the optimizer. A micro-batch is in flight on the first
    stage for at least one round trip through the pipeline, and at most `window` are in flight at a time.

    With halves the gradient of the last micro-batch passes back through I alone, and the first stage's W
    ends the pipeline, or any stage's W that was put off; of those, a window allows as many as it counts.
    """

    def __init__(
        self,
        table: StageTable,
        stages: Sequence[Range],
        mode: Mode,
        *,
        slowdown: Sequence[float] | None = None,
        window: int | None = None,
    ) -> None:
        factors = [1.0] * len(stages) if slowdown is None else slowdown
        parts = _parts(table, stages, factors, mode, window is not None)
        tails_ns = list(accumulate((part.back_ns for part in parts), initial=0))
        self._depth = len(stages)
        self._window = window
        first, last = parts[0], parts[-1]
        self._round_trip_ns = last.lead_ns + last.forward_ns + tails_ns[-1] + first.weight_ns
        self._stages = [
            part.backwards(window, tail_ns + first.weight_ns if part is not first else 0)
            for part, tail_ns in zip(parts, tails_ns, strict=False)
        ]
        self._first = _highest(chain.from_iterable(self._stages))
        """When the first stage's last backward ends."""
        self._pipeline = self._first
        if mode.halves:
            whole = [_Line(part.work_ns, part.lead_ns) for part in parts]
            self._first = _highest([*self._first, _Line(first.work_ns, first.lead_ns)])
            self._pipeline = _highest([*self._first, *whole])
            self._stages = [(*lines, line) for lines, line in zip(self._stages, whole, strict=True)]
        self._forwards = last.backwards(window, -last.back_ns)
        """Time until the last forward of the last stage, which runs each backward (or its I) right after its
        forward."""
        if table.schedule.forwards_first:
            self._forwards = (_Line(last.forward_ns, last.lead_ns),)
        self._sums = _sums(table, stages, parts)
        self._apply_ns = max(
            to_ns(factor * sum(table.calibration.optimizer_s[span.start : span.stop]))
            for span, factor in zip(stages, factors, strict=True)
        )

    def pipeline_ns(self, num_micro_batches: int) -> int:
        """Time until the last backward of a pipeline with this many micro-batches; increasing in them."""
        return max(_at(self._pipeline, num_micro_batches), self._round_trips_ns(num_micro_batches))

    def stage_ns(self, stage: int, num_micro_batches: int) -> int:
        """Time until the last backward of a pipeline one of whose workers of this stage has this many
        micro-batches, however many the others have."""
        latest_ns = _at(self._stages[stage], num_micro_batches)
        return max(latest_ns, self._round_trips_ns(num_micro_batches)) if stage == 0 else latest_ns

    def _round_trips_ns(self, num_micro_batches: int) -> int:
        return 0 if self._window is None else num_micro_batches * self._round_trip_ns // self._window

    @property
    def window_sets_pace(self) -> bool:
        """Whether it is the window that many micro-batches wait for, and not the slowest stage."""
        slowest_ns = max(line.each_ns for line in self._pipeline)
        return self._window is not None and self._round_trip_ns > self._window * slowest_ns

    def pace(self, num_micro_batches: int) -> tuple[int, int]:
        """(fixed nanoseconds, nanoseconds per micro-batch) of a pipeline that carries about this many or
        more."""
        some_ns, twice_ns = (self.pipeline_ns(times * num_micro_batches) for times in (1, 2))
        each_ns = max(1, (twice_ns - some_ns) // num_micro_batches)
        return max(0, some_ns - num_micro_batches * each_ns), each_ns

    def step_ns(self, num_micro_batches: int, rings: AllReduceCosts) -> int:
        """Time of the whole step, if no pipeline carries more micro-batches.

        A worker's all-reduces begin with the section that its last backward reaches first, and not before the
        all-reduce of the losses is over.
        """
        pipeline_ns = self.pipeline_ns(num_micro_batches)
        tallied_ns = _at(self._forwards, num_micro_batches) + rings.tally_ns(self._depth)
        latest_ns = max(pipeline_ns, tallied_ns)
        for sums in self._sums:
            whole_ns = rings.sums_ns[sums.span.stop] - rings.sums_ns[sums.span.start]
            lowest_ns = rings.sums_ns[sums.span.start + 1] - rings.sums_ns[sums.span.start]
            if not whole_ns:
                continue
            ends_ns, begin_ns = _at(sums.ends, num_micro_batches), _at(sums.begin, num_micro_batches)
            if sums.first_earlier_ns is not None:
                ends_ns = max(_at(self._first, num_micro_batches), self._round_trips_ns(num_micro_batches))
                begin_ns = ends_ns - sums.first_earlier_ns
            latest_ns = max(latest_ns, ends_ns + lowest_ns, max(begin_ns, tallied_ns) + whole_ns)
        return latest_ns + rings.commit_ns(self._depth) + self._apply_ns


class AllReduceCosts:
    """Times of all-reduces over `replicas` workers or more, on the faster of both links."""

    def __init__(self, table: StageTable, replicas: int, num_micro_batches: int) -> None:
        self._replicas = replicas
        self._tally_bytes = LOSS_ALLREDUCE_BYTES * num_micro_batches
        self._ring_ns = table.ring_ns
        sizes = table.calibration.own_gradient_bytes
        self.sums_ns = list(accumulate((self._ring_ns(size, replicas) for size in sizes), initial=0))
        """Entry k: the total of the sections before k."""

    def commit_ns(self, depth: int) -> int:
        return self._ring_ns(COMMIT_BYTES, depth * self._replicas)

    def tally_ns(self, depth: int) -> int:
        return self._ring_ns(self._tally_bytes, depth * self._replicas)


class _Line(NamedTuple):
    """Nanoseconds for n micro-batches: n * each + fixed."""

    each_ns: int
    fixed_ns: int


class _Part(NamedTuple):
    """A stage's part in a step, in nanoseconds: n micro-batches end at lead + n * work - saved."""

    lead_ns: int
    """Time until the first micro-batch arrives."""
    work_ns: int
    saved_ns: int
    forward_ns: int
    back_ns: int
    """The stage's backward, or its I, and the message that brings its gradient, if any."""
    weight_ns: int
    """The stage's W; 0 if its backwards are whole."""
    earlier_ns: int
    """Time from when the gradients of the stage's last section are complete to the end of the backward, or
    W."""

    def backwards(self, window: int | None, later_ns: int) -> tuple[_Line, ...]:
        """`later_ns` after the stage's last backward, or I, can end, as if each W came last; but a W comes
        before any forward that the window would not admit."""
        lead_ns = self.lead_ns - self.saved_ns + later_ns
        line = _Line(self.work_ns - self.weight_ns, lead_ns)
        if not self.weight_ns or window is None:
            return (line,)
        return line, _Line(self.work_ns, lead_ns - window * self.weight_ns)


class _Sums(NamedTuple):
    """The all-reduces of stages whose gradients have the same sizes; `span` is one of these stages."""

    span: Range
    ends: tuple[_Line, ...]
    """When their last backwards end."""
    begin: tuple[_Line, ...]
    """When the first of their all-reduces can begin."""
    first_earlier_ns: int | None
    """`earlier_ns` of the pipeline's first stage, whose last backward waits for all others; None for other
    stages."""


def _parts(
    table: StageTable,
    stages: Sequence[Range],
    factors: Sequence[float],
    mode: Mode,
    windowed: bool,
) -> list[_Part]:
    """The parts of all stages. Under GPipe a pipeline saves one recomputation each time it drains, which with
    a window happens many times."""
    parts, lead_ns = list[_Part](), 0
    saves = table.schedule.forwards_first and mode.recompute
    for span, factor in zip(stages, factors, strict=True):
        start, stop = span.start, span.stop

        def takes_ns(compute_ns: int, factor: float = factor) -> int:
            return round(factor * compute_ns) + table.own_ns

        forward_ns = takes_ns(table.forward_ns[stop] - table.forward_ns[start])
        again_ns = takes_ns(table.again_ns(start, stop)) if saves and not windowed else 0
        if table.splits(stop, mode.halves):
            backward_ns = takes_ns(table.input_ns[stop] - table.input_ns[start])
            weight_ns = takes_ns(table.weight_ns[stop] - table.weight_ns[start])
            earlier_ns = takes_ns(table.weight_ns[stop - 1] - table.weight_ns[start])
            work_ns = forward_ns + backward_ns + weight_ns
        else:
            backward_ns = takes_ns(table.backward_ns[stop] - table.backward_ns[start])
            weight_ns = 0
            earlier_ns = takes_ns(table.backward_ns[stop - 1] - table.backward_ns[start])
            work_ns = table.work_ns(start, stop, mode.recompute and not (saves and windowed), factor)
        back_ns = backward_ns + table.back_ns[stop - 1]
        parts.append(_Part(lead_ns, work_ns, again_ns, forward_ns, back_ns, weight_ns, earlier_ns))
        lead_ns += forward_ns + table.there_ns[stop - 1]
    return parts


def _sums(table: StageTable, stages: Sequence[Range], parts: Sequence[_Part]) -> list[_Sums]:
    alike: dict[tuple[int, ...], list[tuple[Range, _Part]]] = {}
    own = table.calibration.own_gradient_bytes
    for span, part in zip(stages, parts, strict=True):
        sizes = own[span.start : span.stop]
        alike.setdefault((*sizes, -1) if span.start == 0 else sizes, []).append((span, part))
    return [
        _Sums(
            members[0][0],
            _highest(_Line(part.work_ns, part.lead_ns - part.saved_ns) for _, part in members),
            _highest(
                _Line(part.work_ns, part.lead_ns - part.saved_ns - part.earlier_ns) for _, part in members
            ),
            members[0][1].earlier_ns if members[0][0].start == 0 else None,
        )
        for members in alike.values()
    ]


def _highest(lines: Iterable[_Line]) -> tuple[_Line, ...]:
    """The lines that are not below another line for all n > 0."""
    found: list[_Line] = []
    for line in sorted(set(lines), reverse=True):
        if not found or line.fixed_ns > found[-1].fixed_ns:
            found.append(line)
    return tuple(found)


def _at(lines: Sequence[_Line], num_micro_batches: int) -> int:
    return max(each_ns * num_micro_batches + fixed_ns for each_ns, fixed_ns in lines)
