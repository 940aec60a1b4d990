"""Chooses a job's m among those that were measured (Varuna §4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from ...pipeline.plan import Range
from ...protocol.messages import Profile, Recipe
from .data import Calibration
from .measurements import Measurements, Row
from .sizes import sizes_of

STILL_IMPROVES = 0.93
"""A doubling of m must save 7 % of the time per sample to be worth its memory."""
MAX_MICROBATCH_SIZE = 64


def profile_of(
    measured: Measurements,
    base: Recipe,
    *,
    wanted: int | None,
    memory_bytes: int,
    most_workers: int,
    stored: bool = False,
) -> Profile:
    """Choose the job's m: `wanted`, else the best measured m that fits into memory and leaves a micro-batch
    for each of `most_workers`. `base` is the recipe for any other m."""
    usable = rows_for_job(measured.rows, base.global_batch_size, most_workers)
    row = measured.row(wanted or best_microbatch_size(usable, memory_bytes))
    recipe = base.model_copy(
        update={
            "microbatch_size": row.microbatch_size,
            "num_micro_batches": base.global_batch_size // row.microbatch_size,
            "cuts": list(row.cuts),
            "graph_hash": row.graph_hash,
        }
    )
    return Profile(
        recipe=recipe,
        calibration=row.calibration.to_json(),
        measurements=measured.to_json(),
        stored=stored,
    )


def rows_for_job(rows: Sequence[Row], global_batch_size: int, most_workers: int) -> Sequence[Row]:
    """Those that a job may take its m from: m divides the global batch, and leaves a micro-batch for each
    worker that the job may have, unless it is the smallest."""
    first, *larger = [row for row in rows if not global_batch_size % row.microbatch_size] or rows
    return [first, *(row for row in larger if global_batch_size // row.microbatch_size >= most_workers)]


def best_microbatch_size(rows: Sequence[Row], memory_bytes: int | None = None) -> int:
    """The smallest m of `rows` (ascending) after which the next no longer saves 7 % of Σ F_i(m)/m, among
    those at which every section fits into `memory_bytes` by itself; the smallest where none does (Varuna
    §4.2)."""
    fitting = [row for row in rows if memory_bytes is None or least_bytes(row.calibration) <= memory_bytes]
    best, *larger = fitting or rows[:1]
    for row in larger:
        if row.seconds_per_sample > STILL_IMPROVES * best.seconds_per_sample:
            break
        best = row
    return best.microbatch_size


def least_bytes(calibration: Calibration) -> int:
    """What the worker of the neediest section needs if it hosts nothing else, with one micro-batch in
    flight."""
    sizes, needs = sizes_of(calibration), [0]
    for section in range(calibration.num_sections):
        span = Range(section, section + 1)
        running = max(sizes.forward_peak(span), sizes.kept(span) + sizes.backward_peak(span))
        step = sizes.inputs(span) + sizes.gradients(span) + sizes.held(span) + running
        resident = sizes.state(span) + sizes.snapshot([(section, 1)])
        needs.append(resident + max(step, sizes.update(span)))
    return max(needs)
