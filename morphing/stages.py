"""Time and memory of any contiguous sections as one stage, computed once for a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..pipeline import Range, Schedule
from ..simulator import Calibration, Sizes, sizes_of, to_ns


class Mode(NamedTuple):
    """How backwards run: after a recomputation, as an I and a W, or neither."""

    recompute: bool = False
    halves: bool = False


WHOLE, HALVES = Mode(), Mode(halves=True)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A stage needs `fixed_bytes` plus `each_bytes` per micro-batch in flight, and `update_bytes` at the end
    of a step, when nothing is in flight."""

    fixed_bytes: int
    each_bytes: int
    update_bytes: int

    @property
    def least_bytes(self) -> int:
        """The memory with a single micro-batch in flight."""
        return max(self.fixed_bytes + self.each_bytes, self.update_bytes)

    def window(self, capacity_bytes: int) -> int | None:
        """How many micro-batches in flight fit; None if their number needs no memory."""
        if self.least_bytes > capacity_bytes:
            return 0
        return (capacity_bytes - self.fixed_bytes) // self.each_bytes if self.each_bytes else None


@lru_cache(maxsize=16)
def stage_table(calibration: Calibration, schedule: Schedule = Schedule.VARUNA) -> StageTable:
    """Cached, so that its memo is shared by equal calibrations."""
    return StageTable(calibration, schedule)


class StageTable:
    """Times of one micro-batch in whole nanoseconds, so that they do not depend on the order of adding.

    `own_ns` is what the worker's code adds to each operation; a worker's slowdown does not multiply it.
    """

    def __init__(self, calibration: Calibration, schedule: Schedule) -> None:
        self.calibration = calibration
        self.num_sections = calibration.num_sections
        self._frozen = calibration.frozen
        self._sizes = sizes_of(calibration)
        self.forward_ns = _sums(calibration.forward_s)
        self.backward_ns = _sums(calibration.backward_s)
        self.input_ns = _sums(calibration.input_s)
        self.weight_ns = _sums(calibration.weight_s)
        self.own_ns = to_ns(calibration.operation_s)
        self.schedule = schedule
        self._links = calibration.inter_vm, calibration.intra_vm
        self.there_ns = [*map(self._message_ns, calibration.cut_bytes), 0]
        """Entry k: the least time of a message from a stage that ends with section k to the next one, and
        (`back_ns`) of the gradient that comes back; 0 for the last section."""
        self.back_ns = [*map(self._message_ns, calibration.grad_cut_bytes), 0]
        self._memory: dict[tuple[int, int, Mode], StageMemory] = {}

    def recomputes(self, stop: int, recompute: bool) -> bool:
        """Whether a stage that ends before section `stop` recomputes: the last stage only where forwards
        come first, as in GPipe (§3.2), a stage of frozen sections never."""
        is_last = stop == self.num_sections
        return recompute and stop > self._frozen and (not is_last or self.schedule.forwards_first)

    def splits(self, stop: int, halves: bool) -> bool:
        """Whether the backwards of a stage that ends before section `stop` are an I and a W: those of frozen
        sections never."""
        return halves and stop > self._frozen

    def work_ns(self, start: int, stop: int, recompute: bool, slowdown: float = 1.0) -> int:
        """All of a stage's operations for one micro-batch."""
        again = self.recomputes(stop, recompute)
        compute_ns = self.forward_ns[stop] - self.forward_ns[start]
        compute_ns += self.backward_ns[stop] - self.backward_ns[start]
        if again:
            compute_ns += self.again_ns(start, stop)
        if slowdown != 1.0:
            compute_ns = round(compute_ns * slowdown)
        return compute_ns + (3 if again else 2) * self.own_ns

    def again_ns(self, start: int, stop: int) -> int:
        """A stage's recomputation, which skips frozen sections."""
        return self.forward_ns[stop] - self.forward_ns[max(start, min(self._frozen, stop))]

    def _message_ns(self, size_bytes: int) -> int:
        """Over the faster link, without jitter."""
        least_s = min(link.latency_s + link.occupied_s(size_bytes) for link in self._links)
        return to_ns(least_s + self.calibration.message_s)

    def ring_ns(self, size_bytes: int, ring: int) -> int:
        """The least time of an all-reduce over `ring` workers; 0 where there is nothing to reduce."""
        if ring < 2 or not size_bytes:
            return 0
        least_s = min(link.allreduce_s(size_bytes, ring) for link in self._links)
        return to_ns(least_s + self.calibration.collective_s)

    def memory(self, start: int, stop: int, mode: Mode) -> StageMemory:
        """A bound on what it takes, which a simulation then checks."""
        key = (start, stop, mode)
        if key not in self._memory:
            self._memory[key] = _memory(self._sizes, Range(start, stop), mode, self.schedule)
        return self._memory[key]


def _memory(sizes: Sizes, span: Range, mode: Mode, schedule: Schedule) -> StageMemory:
    """An upper bound for a stage of a straight pipeline whose workers have the same window.

    A micro-batch in flight at a stage, or waiting in front of it, is in flight at every stage before it; so
    the window bounds both together. Without recomputation each keeps its activations; with it, only its
    input, and one micro-batch at a time has activations as well. The last stage runs each backward right
    after its forward (except under GPipe), so it keeps one micro-batch's activations and the others' inputs.
    A stage of frozen sections keeps only inputs. With halves every stage, the last one too, keeps activations
    and what an I leaves until the W; and since a stage may have done its W before the next one has, as many
    inputs as the window again may wait in front of it. A checkpoint's snapshot is counted in full, as if no
    replica wrote a share of it.
    """
    last = span.stop == sizes.num_sections
    entered = sizes.inputs(span) + sizes.gradients(span) + sizes.held(span)
    kept, backward = sizes.kept(span), sizes.backward_peak(span)
    resident = sizes.state(span) + sizes.snapshot([(section, 1) for section in span.sections])
    update = resident + sizes.update(span)
    # Temporary memory beyond `kept`: of a forward (whose own activations are not kept yet), or a backward.
    running = max(sizes.forward_peak(span) - kept, backward)
    if mode.halves and span.stop > sizes.frozen:
        waiting = sizes.inputs(span)
        running = max(sizes.forward_peak(span) - kept, sizes.weight_peak(span))
        return StageMemory(resident + running, kept + entered + sizes.pending(span) + waiting, update)
    if mode.recompute:
        brief = sizes.brief_forward_peak(span)
        return StageMemory(resident + max(brief, kept + running), entered, update)
    if last and not schedule.forwards_first:
        return StageMemory(resident + kept + running, entered, update)
    return StageMemory(resident + running, kept + entered, update)


def _sums(seconds: Sequence[float]) -> list[int]:
    return list(accumulate(map(to_ns, seconds), initial=0))
