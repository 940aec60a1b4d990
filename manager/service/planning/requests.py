"""Turns a job's state into requests to `makara.morphing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ....morphing import Request, Risk, Slot
from ....pipeline import Range
from ....simulator import Calibration
from ...core.commands import DeathRisk, WorkerSlot
from ...core.state import JobState
from ...spec.job_spec import JobSpec


def request_of(
    state: JobState, workers: Iterable[WorkerSlot], generation: int, risk: DeathRisk | None = None
) -> Request:
    """The planner's request: the job's settings and these workers."""
    assert state.spec is not None, "only a submitted job is planned"
    assert state.recipe is not None, "a plan needs the recipe"
    assert state.calibration is not None, "a recipe comes with its calibration"
    return replace(
        request_for(state.spec, Calibration.from_json(state.calibration), slots_of(workers), generation),
        num_sections=state.recipe.num_sections,
        num_micro_batches=state.recipe.num_micro_batches,
        memory_limit_bytes=state.spec.resources.device_memory,
        holding=holding(state),
        risk=Risk(**risk.model_dump()) if risk is not None else None,
    )


def request_for(
    spec: JobSpec, calibration: Calibration, workers: Sequence[Slot], generation: int = 1
) -> Request:
    """The planner's request by a job file, for workers that hold nothing."""
    parallelism = spec.parallelism
    return Request(
        calibration=calibration,
        num_sections=calibration.num_sections,
        num_micro_batches=spec.training.global_batch_size // calibration.microbatch_size,
        workers=workers,
        generation=generation,
        pipeline_parallel_degree=parallelism.pipeline_parallel_degree,
        data_parallel_degree=parallelism.data_parallel_degree,
        recompute=parallelism.recompute,
        halves=parallelism.halves,
        unequal_pipelines=parallelism.unequal_pipelines,
        tolerated_failures=spec.resilience.tolerated_failures,
        optimizer_offload=spec.offload,
    )


def slots_of(workers: Iterable[WorkerSlot]) -> list[Slot]:
    """Workers as the planner has them."""
    return [Slot(w.worker, w.vm, w.memory_bytes, w.slowdown) for w in workers]


def holding(state: JobState) -> dict[str, Range]:
    """{worker: the sections that it hosted when a generation last formed}. Workers still hold them after a
    death closed that generation; a trainer that has failed since holds nothing."""
    return {
        incarnation.worker: Range(start, stop)
        for incarnation, (start, stop) in state.hosts.items()
        if not state.has_failed(incarnation)
    }
