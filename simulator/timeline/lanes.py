"""A simulated step arranged for drawing: pipelines, and a lane for each of their workers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ...pipeline import Plan, Range
from ..simulation import MiniBatch
from ..spans import Span
from ..step_end import Closing
from ..units import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one worker does and holds during the step; times in seconds from its start."""

    worker: int
    name: str
    vm: str
    sections: Range
    operations: tuple[Span, ...]
    closings: tuple[Closing, ...]
    memory: tuple[tuple[float, int], ...]
    """[(time, resident bytes from then on)]."""
    busy_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The workers of a path, first stage first. `alike` counts equal pipelines that are not shown: their
    workers do the same at the same times with other micro-batches."""

    name: str
    lanes: tuple[Lane, ...]
    alike: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step to draw, or to write for a trace viewer."""

    title: str
    about: str
    plan: Plan
    time_s: float
    pipeline_s: float
    pipelines: tuple[Pipeline, ...]
    num_left_out: int = 0
    """Number of workers in pipelines not shown, apart from those equal to a shown one."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(lane for pipeline in self.pipelines for lane in pipeline.lanes)

    def folded(self, most_lanes: int) -> Timeline:
        """The same with at most `most_lanes` lanes: the first of equal pipelines stands for all, and if that
        is not enough, the last ones are left out. One pipeline is always kept."""
        if len(self.lanes) <= most_lanes:
            return self
        kept: dict[Hashable, Pipeline] = {}
        for pipeline in self.pipelines:
            key = _likeness(pipeline)
            first = kept.setdefault(key, pipeline)
            if first is not pipeline:
                kept[key] = replace(first, alike=first.alike + 1)
        shown: list[Pipeline] = []
        for pipeline in kept.values():
            if shown and sum(len(p.lanes) for p in (*shown, pipeline)) > most_lanes:
                break
            shown.append(pipeline)
        num_shown = sum(len(pipeline.lanes) * (1 + pipeline.alike) for pipeline in shown)
        return replace(self, pipelines=tuple(shown), num_left_out=len(self.lanes) - num_shown)


def timeline_of(
    plan: Plan, step: MiniBatch, *, job: str, microbatch_size: int, vm_of: Sequence[str] | None = None
) -> Timeline:
    """The timeline of a step that was simulated with one. `vm_of` as for `simulate`."""
    operations: list[list[Span]] = [[] for _ in plan.ranges]
    for span in step.timeline:
        operations[span.worker].append(span)
    closings: list[list[Closing]] = [[] for _ in plan.ranges]
    for closing in step.closings:
        closings[closing.worker].append(closing)

    def lane(worker: int, name: str) -> Lane:
        return Lane(
            worker=worker,
            name=name,
            vm=vm_of[worker] if vm_of is not None else "",
            sections=plan.ranges[worker],
            operations=tuple(operations[worker]),
            closings=tuple(closings[worker]),
            memory=step.memory[worker],
            busy_s=step.busy_s[worker],
            peak_bytes=step.peak_bytes[worker],
        )

    pipelines = [
        Pipeline(f"replica {number}", tuple(lane(worker, f"stage {stage}") for worker, stage in members))
        for number, members in enumerate(_members(plan))
    ]
    on_paths = {hop.worker for path in plan.paths for hop in path.hops}
    beside = [worker for worker in range(plan.num_workers) if worker not in on_paths]
    pipelines.append(Pipeline("on no path", tuple(lane(worker, f"worker {worker}") for worker in beside)))
    return Timeline(
        title=f"{job}: P×D = {plan.shape.replace('x', '×')}, one step in {seconds(step.time_s)}",
        about=_about(plan, step, microbatch_size),
        plan=plan,
        time_s=step.time_s,
        pipeline_s=step.pipeline_s,
        pipelines=tuple(pipeline for pipeline in pipelines if pipeline.lanes),
    )


def _members(plan: Plan) -> list[list[tuple[int, int]]]:
    """(worker, stage) of each path; a worker is shown once, at its first place."""
    seen: set[int] = set()
    members: list[list[tuple[int, int]]] = []
    for path in plan.paths:
        members.append([])
        for stage, hop in enumerate(path.hops):
            if hop.worker not in seen:
                members[-1].append((hop.worker, stage))
            seen.add(hop.worker)
    return members


def _likeness(pipeline: Pipeline) -> Hashable:
    return tuple(
        (
            lane.name,
            lane.sections,
            lane.peak_bytes,
            tuple((span.operation.kind, span.start_s, span.stop_s) for span in lane.operations),
            tuple(closing[1:] for closing in lane.closings),
        )
        for lane in pipeline.lanes
    )


def _about(plan: Plan, step: MiniBatch, microbatch_size: int) -> str:
    idle = sum(step.idle_s) / (step.time_s * plan.num_workers) if step.time_s else 0.0
    facts = [
        f"{plan.num_workers} workers" if plan.num_workers > 1 else "1 worker",
        f"N = {plan.num_micro_batches} micro-batches of {microbatch_size}",
        f"schedule {plan.schedule.value}",
        "window unbounded" if plan.window is None else f"window {plan.window}",
        *(["recomputation"] if plan.recompute else []),
        *(["backwards in halves"] if plan.has_halves else []),
        *(["optimizer on the host"] if plan.optimizer_on_host else []),
        f"idle {100 * idle:.1f} %",
        f"{seconds(step.time_s - step.pipeline_s)} after the last backward",
    ]
    return "; ".join(facts)
