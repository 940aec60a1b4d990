"""How long a step takes in plain PyTorch: the user's own module, uncut, on one thread of this machine.

`python -m makara.worker.profiling.plain_step FOLDER ENTRYPOINT GLOBAL_BATCH_SIZE MICROBATCH_SIZE` prints one
line of JSON, `{"seconds": ...}`. It loads nothing of torch.export: the answer is there soon after torch is.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ...model.data import Batches, copied, open_dataset
from ...model.tracing.calling import forward_call
from ...model.training import Training, build_module, load_entrypoint, set_training_mode, sum_and_weight
from ...protocol.answers import write_answer

_REPEATS = 5


def plain_step_s(training: Training, global_batch_size: int, m: int) -> float:
    """Seconds for the forwards and backwards of one step, in micro-batches of m; no optimizer."""
    torch.set_num_threads(1)
    module: Any = build_module(training)
    set_training_mode(module)
    batches = Batches(open_dataset(training, 0), 0, global_batch_size, m)
    batch = batches.micro_batch(0, 0)
    call = forward_call(module, batch, training.forward_kwargs)
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        loss: Any = training.loss(module(**call.arguments(batch)), copied(batch))
        sum_and_weight(loss)[0].backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * batches.num_micro_batches


def main() -> None:
    folder, entrypoint, global_batch_size, m = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):  # the user's code may print; the answer stands alone
        training = load_entrypoint(Path(folder), entrypoint)
        seconds = plain_step_s(training, int(global_batch_size), int(m))
    write_answer({"seconds": seconds})


if __name__ == "__main__":
    main()
