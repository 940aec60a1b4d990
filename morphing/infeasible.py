"""Messages that say why there is no plan, and what the user can change."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Candidate, Request
from .search_space import megabytes
from .stages import Mode, stage_table


def degrees_impossible(request: Request) -> str | None:
    """Why the fixed degrees are impossible with these workers, whatever the memory; None if they are not."""
    depth, replicas = request.pipeline_parallel_degree, request.data_parallel_degree
    if depth is not None and depth > request.num_sections:
        return too_deep(depth, request.num_sections)
    if replicas is not None and replicas > request.num_micro_batches:
        return f"data_parallel_degree: {replicas}, but a step has {request.num_micro_batches} micro-batches"
    needed = (depth or 1) * (replicas or 1)
    if needed > len(request.workers):
        return f"the fixed degrees need {needed} workers, there are {len(request.workers)}"
    return None


def too_deep(depth: int, num_sections: int) -> str:
    """The message that a model of `num_sections` has no pipeline of `depth` stages, and what to change."""
    count = "1 section" if num_sections == 1 else f"{num_sections} sections"
    return (
        f"pipeline_parallel_degree: {depth}, but the model is cut into {count}; lower it, or cut the model "
        "finer (parallelism.num_sections, or more names in Training.cuts)"
    )


def nothing_fits(request: Request, looked_at: Sequence[Candidate]) -> str:
    """Why no shape fits into memory, and what to change."""
    capacity = max(slot.memory_bytes for slot in request.workers)
    if request.memory_limit_bytes is not None:
        capacity = min(capacity, request.memory_limit_bytes)
    recompute = request.recompute != "off"
    least = [_least_bytes(request, section, recompute) for section in range(request.num_sections)]
    largest = max(range(request.num_sections), key=least.__getitem__)
    if least[largest] > capacity:
        return (
            f"no split of the model fits: {request.calibration.name(largest)} needs "
            f"{megabytes(least[largest])}, the workers have {megabytes(capacity)}; "
            f"{_remedy(request, largest, capacity)}"
        )
    depths = sorted({row.pipeline_parallel_degree for row in looked_at})
    span = f"P={depths[0]}" if len(depths) == 1 else f"P={depths[0]} to {depths[-1]}"
    return (
        f"no split of the model fits for {span}: the workers have {megabytes(capacity)} at most, "
        f"though each section alone would fit; there are {len(request.workers)} workers"
    )


def _remedy(request: Request, section: int, capacity: int) -> str:
    """What to change if a section is too big for every worker."""
    calibration = request.calibration
    m = calibration.microbatch_size
    activations = calibration.activation_bytes[section]
    needed = _least_bytes(request, section, recompute=True)
    remedies = [
        "cut the model finer there (Training.cuts, or parallelism.num_sections, now "
        f"{calibration.num_sections})",
        "take VMs with more memory",
    ]
    if m > 1 and needed - activations + activations // m <= capacity:
        remedies.insert(0, f"lower parallelism.microbatch_size, now {m}")
    if request.recompute == "off" and needed <= capacity:
        remedies.insert(0, "allow parallelism.recompute")
    return ", or ".join(remedies)


def _least_bytes(request: Request, section: int, recompute: bool) -> int:
    """The memory of a worker that hosts this section, alone or with neighbours if less crosses then."""
    calibration = request.calibration
    if request.optimizer_offload != "off":
        calibration = calibration.with_optimizer_on_host()
    table = stage_table(calibration, request.schedule)
    return min(
        table.memory(start, stop, Mode(recompute)).least_bytes
        for start in range(section + 1)
        for stop in range(section + 1, request.num_sections + 1)
    )
