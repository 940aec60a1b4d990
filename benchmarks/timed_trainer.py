"""A trainer that writes down when the first forward of each step, or rest of a step, was done."""

from __future__ import annotations

import os
import time
from pathlib import Path

from makara.worker.execution.executor import Executor, Sink, Work
from makara.worker.sections.ranges import RangeOutput
from makara.worker.trainer import trainer
from torch import Tensor

TIMES = Path(os.environ["MAKARA_BENCHMARK_TIMES"])  # a line for each run: seconds by `time.monotonic`

_run = Executor.run


class _Timed(Sink):
    def __init__(self, inner: Sink) -> None:
        self._inner = inner
        self._is_first = True

    def forwarded(self, micro_batch: int, output: RangeOutput) -> None:
        if self._is_first:
            self._is_first = False
            with TIMES.open("a") as file:
                file.write(f"{time.monotonic()}\n")
        self._inner.forwarded(micro_batch, output)

    def gradient(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        self._inner.gradient(micro_batch, section, name, gradient)

    def section_done(self, micro_batch: int, section: int) -> None:
        self._inner.section_done(micro_batch, section)


def run(self: Executor, step: int, sink: Sink) -> Work:
    return _run(self, step, _Timed(sink))


if __name__ == "__main__":
    Executor.run = run
    trainer.main()
