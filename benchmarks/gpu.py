"""Real trainers on one GPU beside the same model in plain PyTorch, and the predictions.

With several stages, their processes share the GPU, which takes them in turns, and tensors go by gloo through
host memory: the step is then that of no real pipeline, and is not predicted. Nor is the order of operations
that of one, so that more micro-batches may lie between their I and W than predicted: what the planner counts
with is the most that the window admits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from makara.model.data import Batches
from makara.model.training import load_entrypoint
from makara.morphing.stages import Mode, stage_table
from makara.pipeline import Plan, grid
from makara.protocol.messages import JobSettings, Phase, Profile, Recipe
from makara.simulator import Calibration, simulate

from .emulated.fleet import in_fresh_process
from .made_up import stages
from .report import Row
from .trainers import BUNDLE, Trainer, form, job_settings, prepare, profiled

TITLE = "a step of a transformer in bf16 on one GPU, plain PyTorch and trainers; seconds, and peak MB"
ENTRYPOINT = "memory_models:large"
Numerics = Literal["fast", "exact"]
STEPS, WARM = 12, 4
M, NUM_MICRO_BATCHES, SECTIONS = 64, 8, 12
CASES: tuple[tuple[int, Numerics, dict[str, Any]], ...] = (
    (1, "fast", {}),
    (1, "exact", {}),
    (2, "fast", {"window": 2}),
    (2, "fast", {"window": 2, "halves": True}),
)
"""P, the job's numerics, and the plan's other settings."""


def rows() -> list[Row]:
    """Plain PyTorch, then a row for each case; memory is that of the busiest rank."""
    if not torch.cuda.is_available():
        raise SystemExit("gpu: torch finds no GPU here")
    seconds, peak = in_fresh_process(_plain)
    profiles: dict[Numerics, Profile] = {}
    plain = _row("plain PyTorch", seconds, seconds, peak)
    return [plain, *(_case(*case, seconds, profiles) for case in CASES)]


def _case(
    depth: int,
    numerics: Numerics,
    settings: dict[str, Any],
    plain_s: float,
    profiles: dict[Numerics, Profile],
) -> Row:
    """`settings`: of the plan. `profiles`: those that were made."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_settings(
            ENTRYPOINT,
            folder,
            M,
            NUM_MICRO_BATCHES,
            steps=STEPS,
            num_sections=SECTIONS,
            numerics=numerics,
            precision="bf16",
            checkpoint_interval_steps=STEPS,
        )
        if numerics not in profiles:
            profiles[numerics] = profiled(job, seconds=10.0)
        calibration = Calibration.from_json(profiles[numerics].calibration)
        equal = stages(calibration.num_sections, depth)
        plan = grid(equal, 1, NUM_MICRO_BATCHES, generation=1, **settings)
        seconds, peak = _train(job, plan, profiles[numerics].recipe, Path(folder))
        predicted = simulate(plan, calibration)
        predicted_s = predicted.time_s if depth == 1 else None
        name = f"P={depth}, {numerics}" + ", halves" * plan.halves
        most = _most_bytes(plan, calibration)
        return _row(name, seconds, plain_s, peak, predicted_s, max(predicted.peak_bytes), most)


def _most_bytes(plan: Plan, calibration: Calibration) -> int:
    """What the busiest stage needs at the most, by the bound that the planner works with."""
    table, mode = stage_table(calibration), Mode(halves=plan.halves)
    window = plan.num_micro_batches if plan.window is None else plan.window
    memories = [table.memory(span.start, span.stop, mode) for span in plan.ranges]
    return max(
        max(memory.fixed_bytes + window * memory.each_bytes, memory.update_bytes) for memory in memories
    )


def _row(
    name: str,
    seconds: float,
    plain_s: float,
    peak: int,
    predicted_s: float | None = None,
    predicted_bytes: int | None = None,
    most_bytes: int | None = None,
) -> Row:
    return {
        "side": name,
        "s": seconds,
        "over plain": seconds / plain_s,
        "predicted s": "" if predicted_s is None else predicted_s,
        "predicted / measured s": "" if predicted_s is None else predicted_s / seconds,
        "peak": peak / 1e6,
        "predicted peak": "" if predicted_bytes is None else predicted_bytes / 1e6,
        "predicted / measured peak": "" if predicted_bytes is None else predicted_bytes / peak,
        "at most": "" if most_bytes is None else most_bytes / 1e6,
    }


def _train(job: JobSettings, plan: Plan, recipe: Recipe, folder: Path) -> tuple[float, int]:
    """(median seconds of a step of the slowest rank, peak bytes of the busiest) of trainers under `plan`."""
    steps = folder / "steps"
    steps.mkdir()
    variables = {"MAKARA_BENCHMARK_STEPS": str(steps)}
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Trainer(f"w{rank}", job, "gpu_trainer.py", variables))
            for rank in range(plan.num_workers)
        ]
        prepare(trainers, recipe)
        form(trainers, plan, recipe, job)
        for trainer in trainers:
            trainer.wait(lambda report: report.phase is Phase.FINISHED)
    found = [[line.split() for line in path.read_text().splitlines()] for path in steps.iterdir()]
    return (
        max(statistics.median(float(seconds) for seconds, *_ in lines[WARM:]) for lines in found),
        max(int(lines[-1][1]) for lines in found),
    )


def _plain() -> tuple[float, int]:
    """(median seconds of a step, peak bytes) of the same model, optimizer and samples in plain PyTorch."""
    training = load_entrypoint(BUNDLE, ENTRYPOINT)
    model = training.model().cuda()
    optimizer = training.optimizer(list(model.named_parameters()))
    batches = Batches(training.dataset(), 3, M * NUM_MICRO_BATCHES, M)
    times: list[float] = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        began = time.monotonic()
        for i in range(NUM_MICRO_BATCHES):
            batch = {name: value.cuda() for name, value in batches.micro_batch(step, i).items()}
            with torch.autocast("cuda", torch.bfloat16):
                loss = training.loss(model(batch["tokens"]), batch) / NUM_MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return statistics.median(times[WARM:]), torch.cuda.max_memory_allocated()
