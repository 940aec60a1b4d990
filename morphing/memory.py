"""Bounds on a stage's memory, for use before a simulation, which then checks the real peak."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline import Range, Schedule
from ..simulator import Calibration, sizes_of


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


def stage_memory(
    calibration: Calibration, span: Range, *, recompute: bool, schedule: Schedule
) -> StageMemory:
    """An upper bound for a stage of a straight pipeline whose workers have the same window.

    A micro-batch in flight at a stage, or waiting in front of it, is in flight at every stage before it; so
    the window bounds both together. Without recomputation each keeps its activations; with it, only its
    input, and one micro-batch at a time has activations as well. The last stage runs each backward right
    after its forward (except under GPipe), so it keeps one micro-batch's activations and the others' inputs.
    A stage of frozen sections keeps only inputs. A checkpoint's snapshot is counted in full, as if no replica
    wrote a share of it.
    """
    sizes = sizes_of(calibration)
    last = span.stop == calibration.num_sections
    entered = sizes.inputs(span) + sizes.gradients(span) + sizes.held(span)
    kept, backward = sizes.kept(span), sizes.backward_peak(span)
    resident = sizes.state(span) + sizes.snapshot([(section, 1) for section in span.sections])
    update = resident + sizes.update(span)
    # Temporary memory beyond `kept`: of a forward (whose own activations are not kept yet), or a backward.
    running = max(sizes.forward_peak(span) - kept, backward)
    if recompute:
        brief = sizes.brief_forward_peak(span)
        return StageMemory(resident + max(brief, kept + running), entered, update)
    if last and not schedule.forwards_first:
        return StageMemory(resident + kept + running, entered, update)
    return StageMemory(resident + running, kept + entered, update)
