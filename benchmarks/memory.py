"""Peak resident memory of real trainers, above that once the model is traced, against the prediction."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from makara.checkpoint import open_generation, open_store
from makara.model.training import load_entrypoint
from makara.pipeline import Plan, Range, grid
from makara.protocol.messages import JobSettings, Phase, Profile, Recipe, StoreConfig
from makara.simulator import Calibration, simulate
from makara.worker.agent.trainer_process import ALLOCATOR
from makara.worker.profiling.profiling import profile

from .emulated.fleet import in_fresh_process
from .report import Row
from .trainers import Trainer, form

TITLE = "peak resident memory above that once the model is traced, MB, and as predicted"
STEPS = 4
WINDOW = 2  # without one, how far the first stage runs ahead, and so its peak, differs from run to run
# A checkpoint is on its way while the next step runs.
ENVIRONMENT = {**ALLOCATOR, "MAKARA_BENCHMARK_PUT_S": "1.5", **os.environ}
BUNDLE = Path(__file__).parent
MODELS = {"activations": (128, 3), "state": (4, 4)}  # micro-batch size, micro-batches


def rows() -> list[Row]:
    """A row for each worker of P=2."""
    return [row for model in MODELS for row in rows_of(model)]


def rows_of(model: str) -> list[Row]:
    m, num_micro_batches = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        job = JobSettings(
            job=model,
            entrypoint=f"memory_models:{model}",
            seed=3,
            steps=STEPS,
            global_batch_size=m * num_micro_batches,
            microbatch_size=m,
            numerics="fast",
            checkpoint_interval_steps=2,
            store=StoreConfig(uri=f"file://{folder}"),
            bundle_sha256="0" * 64,
        )
        first = in_fresh_process(_profile, job, environment=ALLOCATOR)
        calibration = Calibration.from_json(first.calibration)
        found: list[Row] = []
        for recompute, halves in ((False, False), (True, False), (False, True)):
            own = job.model_copy(update={"store": StoreConfig(uri=f"file://{folder}/{recompute}{halves}")})
            plan = grid(
                _stages(calibration),
                1,
                num_micro_batches,
                window=WINDOW,
                recompute=recompute,
                halves=halves,
                generation=1,
            )
            open_generation(open_store(own.store.uri), own.job, plan.generation)
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


def _stages(calibration: Calibration) -> list[Range]:
    middle = calibration.num_sections // 2
    return [Range(0, middle), Range(middle, calibration.num_sections)]


def _profile(job: JobSettings) -> Profile:
    """What a first worker finds that is alone, in a process of its own."""
    return profile(load_entrypoint(BUNDLE, job.entrypoint), job)


def _peaks(job: JobSettings, plan: Plan, recipe: Recipe) -> list[int]:
    """Each rank's peak resident bytes above those of a traced model, over all steps and the last
    checkpoint."""
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Trainer(f"w{rank}", job, BUNDLE, ENVIRONMENT))
            for rank in range(plan.num_workers)
        ]
        for trainer in trainers:
            trainer.order()
            trainer.wait(lambda report: report.phase is Phase.IDLE)
        for trainer in trainers:
            trainer.order(recipe=recipe)
        for trainer in trainers:
            trainer.wait(lambda report: report.graph_hash is not None)
        before = [_status_bytes(trainer, "VmRSS") for trainer in trainers]
        form(trainers, plan, recipe)
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
