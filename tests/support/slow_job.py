"""The job of whole runs: `models.slow_gpt`, and what its weights are when nothing happens on the way."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import models
from trainer_processes import settings
from uninterrupted import uninterrupted
from weight_hashes import state_sha256

STEPS = 24
BATCH = {"global_batch_size": 8, "seed": 7}
SHAPE = {"microbatch_size": 2, "num_sections": 8}
MODEL = Path(models.__file__).read_text()


@cache
def reference(steps: int = STEPS, global_batch_size: int = BATCH["global_batch_size"]) -> str:
    """The weight hash of the uninterrupted run of `numerics: exact`."""
    batch = {**BATCH, "global_batch_size": global_batch_size}
    job = settings(Path("/unused"), **batch, **SHAPE, numerics="exact")
    _, state = uninterrupted(models.slow_gpt(nap_s=0.0), job, steps)
    return state_sha256(state)
