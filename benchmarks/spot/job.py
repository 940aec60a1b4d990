"""The job: an emulated model that needs three VMs, and the folder of its code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from makara.manager.replay import Policy
from makara.manager.spec.job_spec import JobSpec, parse_spec

from .market import NODES

FIXED_DEPTH = 4
"""P of the policy that fixes it: the best for `NODES` VMs."""
MICROBATCH_SIZE, NUM_MICRO_BATCHES = 4, 32
BATCH = MICROBATCH_SIZE * NUM_MICRO_BATCHES
_NUM_SECTIONS = 13
_MEMORY_BYTES = 480_000
"""Five or six sections fit (80 kB each, and 40 kB): three VMs hold the model."""
_STEPS = 10**6
_INTERVAL = 3  # steps between checkpoints
_CODE = Path(__file__).parents[1]  # benchmarks/


def sections(policy: Policy) -> dict[str, Any]:
    """The job file's, but for the entrypoint and where checkpoints go."""
    parallelism: dict[str, Any] = {
        "microbatch_size": MICROBATCH_SIZE,
        "num_sections": _NUM_SECTIONS,
        "unequal_pipelines": "auto",
    }
    return {
        "resources": {
            "provider": "local",
            "min_nodes": 3,
            "max_nodes": NODES,
            "device_memory": _MEMORY_BYTES,
        },
        "training": {"global_batch_size": BATCH, "steps": _STEPS, "seed": 3},
        "parallelism": parallelism
        | ({"pipeline_parallel_degree": FIXED_DEPTH} if policy.fixes_depth else {}),
        "checkpoint": {"interval": _INTERVAL, "keep_latest_k": 3},
        "envs": {} if policy.keeps_state else {"MAKARA_BENCHMARK_RESTARTS": "1"},
    }


def spec_of(policy: Policy) -> JobSpec:
    """As a replay takes it."""
    given = sections(policy)
    given["checkpoint"] = {**given["checkpoint"], "uri": "file:///checkpoints"}
    return parse_spec({"name": "job", "entrypoint": "train:build", **given})


def write_code(folder: Path) -> Path:
    """The folder with the job's code: `train.py`, and what it imports of the benchmarks."""
    emulated = folder / "benchmarks" / "emulated"
    emulated.mkdir(parents=True)
    for name in ("__init__.py", "device.py", "models.py"):
        shutil.copy(_CODE / "emulated" / name, emulated / name)
    shutil.copy(_CODE / "sleepy.py", folder / "benchmarks" / "sleepy.py")
    shutil.copy(_CODE / "spot" / "train.py", folder / "train.py")
    return folder
