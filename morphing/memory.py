"""What a stage needs of a worker's memory: bounds taken before a simulation, which then confirms them."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline import Range, Schedule
from ..simulator import Calibration, sizes_of


@dataclass(frozen=True, slots=True)
class StageMemory:
    """`fixed_bytes` whatever is in flight, plus `each_bytes` for every micro-batch in flight; and at the end
    of a step `update_bytes`, when nothing is in flight."""

    fixed_bytes: int
    each_bytes: int
    update_bytes: int

    @property
    def least_bytes(self) -> int:
        """With a single micro-batch in flight."""
        return max(self.fixed_bytes + self.each_bytes, self.update_bytes)

    def window(self, capacity_bytes: int) -> int | None:
        """How many micro-batches fit in flight; 0 if not even one, None if their number does not matter."""
        if self.least_bytes > capacity_bytes:
            return 0
        return (capacity_bytes - self.fixed_bytes) // self.each_bytes if self.each_bytes else None


def stage_memory(
    calibration: Calibration, span: Range, *, recompute: bool, schedule: Schedule
) -> StageMemory:
    """An upper bound for a stage of a straight pipeline whose workers all keep to one window.

    A micro-batch in flight at a stage, or waiting in front of it, is in flight at every stage before it; so
    the window bounds both together. Without recomputation each keeps its activations; with it, its input
    only, and one micro-batch at a time has activations besides. The last stage runs the backward straight
    after the forward (except under GPipe), so it keeps one micro-batch's activations and the others' inputs.
    A stage of frozen sections keeps inputs only.
    A checkpoint's snapshot is counted as if no replica took a share of it.
    """
    sizes = sizes_of(calibration)
    last = span.stop == calibration.num_sections
    entered = sizes.inputs(span) + sizes.gradients(span) + sizes.held(span)
    kept, backward = sizes.kept(span), sizes.backward_peak(span)
    resident = sizes.state(span) + sizes.snapshot([(section, 1) for section in span.sections])
    update = resident + sizes.update(span)
    # Beyond what is kept: while a forward runs (its own activations are not kept yet), or a backward.
    running = max(sizes.forward_peak(span) - kept, backward)
    if recompute:
        brief = sizes.brief_forward_peak(span)
        return StageMemory(resident + max(brief, kept + running), entered, update)
    if last and schedule is not Schedule.GPIPE:
        return StageMemory(resident + kept + running, entered, update)
    return StageMemory(resident + running, kept + entered, update)
