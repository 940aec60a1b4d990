"""Bounds on a stage's memory, for use before a simulation, which then checks the real peak."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline import Range, Schedule
from ..simulator import Sizes


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


def stage_memory(sizes: Sizes, span: Range, recompute: bool, halves: bool, schedule: Schedule) -> StageMemory:
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
    if halves and span.stop > sizes.frozen:
        waiting = sizes.inputs(span)
        running = max(sizes.forward_peak(span) - kept, sizes.weight_peak(span))
        return StageMemory(resident + running, kept + entered + sizes.pending(span) + waiting, update)
    if recompute:
        brief = sizes.brief_forward_peak(span)
        return StageMemory(resident + max(brief, kept + running), entered, update)
    if last and not schedule.forwards_first:
        return StageMemory(resident + kept + running, entered, update)
    return StageMemory(resident + running, kept + entered, update)
