"""A trainer that writes down what each step took, and what it has had of the GPU's memory at most.

A line for each step in a file of its process: seconds, and bytes: the peaks of tensors and of what torch's
allocator has reserved for them, what it reserves now, and what all processes use of the GPU now.
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
        free, whole = torch.cuda.mem_get_info()
        peaks = f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}"
        file.write(f"{time.monotonic() - began} {peaks} {torch.cuda.memory_reserved()} {whole - free}\n")
    return result


if __name__ == "__main__":
    Stepper.step = step
    trainer.main()
