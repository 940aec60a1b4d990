"""Peak resident memory of real trainers, above that once the model is traced, against the prediction."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from makara.pipeline import Plan, grid
from makara.protocol.messages import JobSettings, Phase, Recipe, StoreConfig
from makara.simulator import Calibration, simulate

from .made_up import stages
from .report import Row
from .trainers import Trainer, form, job_settings, prepare, profiled

TITLE = "peak resident memory above that once the model is traced, MB, and as predicted"
STEPS = 4
WINDOW = 2  # without one, how far the first stage runs ahead, and so its peak, differs from run to run
SLOW = {"MAKARA_BENCHMARK_PUT_S": "1.5"}  # a checkpoint is on its way while the next step runs
MODELS = {"activations": (128, 3), "state": (4, 4)}  # micro-batch size, micro-batches


def rows() -> list[Row]:
    """A row for each worker of P=2."""
    return [row for model in MODELS for row in rows_of(model)]


def rows_of(model: str) -> list[Row]:
    m, num_micro_batches = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        job = job_settings(
            f"memory_models:{model}",
            folder,
            m,
            num_micro_batches,
            steps=STEPS,
            numerics="fast",
            checkpoint_interval_steps=2,
        )
        first = profiled(job)
        calibration = Calibration.from_json(first.calibration)
        found: list[Row] = []
        for recompute, halves in ((False, False), (True, False), (False, True)):
            own = job.model_copy(update={"store": StoreConfig(uri=f"file://{folder}/{recompute}{halves}")})
            plan = grid(
                stages(calibration.num_sections, 2),
                1,
                num_micro_batches,
                window=WINDOW,
                recompute=recompute,
                halves=halves,
                generation=1,
            )
            predicted = simulate(plan, calibration).peak_bytes
            measured = _peaks(own, plan, first.recipe)
            for rank, (guess, peak) in enumerate(zip(predicted, measured, strict=True)):
                found.append(
                    {
                        "model": model,
                        "recompute": recompute,
                        "halves": halves,
                        "rank": rank,
                        "measured": peak / 1e6,
                        "predicted": guess / 1e6,
                        "predicted / measured": guess / peak,
                    }
                )
        return found


def _peaks(job: JobSettings, plan: Plan, recipe: Recipe) -> list[int]:
    """Each rank's peak resident bytes above those of a traced model, over all steps and the last
    checkpoint."""
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Trainer(f"w{rank}", job, "slow_trainer.py", SLOW))
            for rank in range(plan.num_workers)
        ]
        for trainer in trainers:
            trainer.order()
            trainer.wait(lambda report: report.phase is Phase.IDLE)
        prepare(trainers, recipe)
        before = [_status_bytes(trainer, "VmRSS") for trainer in trainers]
        form(trainers, plan, recipe, job)
        for trainer in trainers:
            trainer.wait(lambda report: report.phase is Phase.FINISHED)
        return [
            _status_bytes(trainer, "VmHWM") - base for trainer, base in zip(trainers, before, strict=True)
        ]


def _status_bytes(trainer: Trainer, field: str) -> int:
    for line in Path(f"/proc/{trainer.pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/{trainer.pid}/status has no {field}; this benchmark needs Linux")
