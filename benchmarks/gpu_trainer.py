"""A trainer that writes down what each step took, and its peak of the GPU's memory so far.

A line for each step in a file of its process: seconds and bytes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from makara.worker.execution.stepper import CommitRequest, Stepper, StepResult
from makara.worker.trainer import trainer

STEPS = Path(os.environ["MAKARA_BENCHMARK_STEPS"]) / str(os.getpid())

_step = Stepper.step


def step(self: Stepper, ballot: CommitRequest) -> StepResult:
    began = time.monotonic()
    result = _step(self, ballot)
    with STEPS.open("a") as file:
        file.write(f"{time.monotonic() - began} {torch.cuda.max_memory_allocated()}\n")
    return result


if __name__ == "__main__":
    Stepper.step = step
    trainer.main()
