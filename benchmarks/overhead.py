"""What the executor itself costs for each operation: a pipeline whose sections do nothing."""

from __future__ import annotations

import statistics
import time

from makara.model.data import Batches
from makara.worker.sections.ranges import RangeRuntime

from .ranks import measure
from .report import Row
from .sides import SEED, Setting, trace_chain
from .sleepy import training

TITLE = "a step whose sections do next to nothing, microseconds for each operation of the busiest rank"
ROUNDS = 5
NUM_MICRO_BATCHES = 128


def rows() -> list[Row]:
    return [row(depth, recompute) for depth in (1, 2) for recompute in (False, True)]


def row(depth: int, recompute: bool) -> Row:
    sides = ("makara varuna",) if depth == 1 else ("makara varuna", "torch GPipe", "torch 1F1B")
    setting = Setting(
        depth=depth,
        num_micro_batches=NUM_MICRO_BATCHES,
        forward_s=0.0,
        recompute=recompute,
        sides=sides,
        blocks_per_stage=1,
        width=1,
    )
    operations = (3 if recompute and depth > 1 else 2) * NUM_MICRO_BATCHES
    seconds = measure(setting, ROUNDS)
    found: dict[str, str | int | float | bool] = {"P": depth, "recompute": recompute}
    for name in ("makara varuna", "torch GPipe", "torch 1F1B"):
        found[f"{name} us"] = 1e6 * seconds[name] / operations if name in seconds else ""
    alone_us = 1e6 * _alone_s(setting)
    own_us = 1e6 * seconds["makara varuna"] / operations - alone_us
    return found | {"sections alone us": alone_us, "makara's own us": own_us}


def _alone_s(setting: Setting) -> float:
    """Median seconds of an operation when the sections are called in a loop, without an executor."""
    job = training(setting.num_blocks, setting.width, setting.block_s, setting.samples)
    runtime = RangeRuntime(trace_chain(setting), job, SEED)
    for index in range(setting.num_blocks):
        runtime.host(index)
    batches = Batches(job.dataset(), SEED, setting.samples, setting.microbatch_size)
    times: list[float] = []
    for micro_batch in range(NUM_MICRO_BATCHES):
        batch = batches.micro_batch(0, micro_batch)
        began = time.perf_counter()
        runtime.forward(0, micro_batch, 0, setting.num_blocks, {}, batch, keep=True)
        runtime.backward(micro_batch, 0, {}, lambda *_: None)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / (2 * setting.depth)
