"""Measures a model, cut as it is, on this machine: times and sizes of each section (Varuna §4.3).

For one m and one worker. What a job does, for several m and with several workers, is in
`worker.profiling.profiling`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from makara.model.partition.partition import Sections
from makara.model.training import Training
from makara.simulator import Calibration, Link
from makara.simulator.calibration.assembly import tied_sums_of
from makara.worker.profiling.section import LEAST_REPEATS, Conditions, measure_section
from makara.worker.profiling.subject import layout_of

_SECTION_S = 1.0


def calibrate(
    chain: Sections,
    training: Training,
    *,
    seed: int,
    numerics: Literal["exact", "fast"],
    num_micro_batches: int,
    repeats: int = LEAST_REPEATS,
) -> Calibration:
    """Times (seconds) and sizes (bytes) of each section. Links are not measured: callers put theirs in.

    `numerics` and N decide the size of the gradient sums. One section is in memory at a time.
    """
    conditions = Conditions(
        training=training,
        seed=seed,
        numerics=numerics,
        num_micro_batches=num_micro_batches,
        repeats=repeats,
        section_s=_SECTION_S,
    )
    layout = layout_of(chain, numerics)
    rows = [measure_section(chain, index, conditions) for index in range(chain.num_sections)]
    no_link = Link(latency_s=0.0, bytes_per_s=1.0)
    times: dict[str, Any] = {name: tuple(row.times[name].median for row in rows) for name in rows[0].times}
    sizes: dict[str, Any] = {name: tuple(row.sizes[name] for row in rows) for name in rows[0].sizes}
    return Calibration(
        **times,
        **sizes,
        cut_bytes=tuple(layout.cut_bytes),
        grad_cut_bytes=tuple(layout.grad_cut_bytes),
        tied_sums=tied_sums_of(layout),
        inter_vm=no_link,
        intra_vm=no_link,
        device_kind="cpu",
        microbatch_size=layout.microbatch_size,
        versions={"torch": torch.__version__},
        labels=tuple(layout.labels),
    )
