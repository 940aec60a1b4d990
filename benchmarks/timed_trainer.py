"""A trainer that writes down when each step, or rest of a step, began, had its first forward done, and ended.

A line for each: what, the generation, and seconds by `time.monotonic`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from makara.worker.execution.executor import Executor, Sink, Work
from makara.worker.execution.session import Session
from makara.worker.execution.stepper import CommitRequest, Stepper, StepResult
from makara.worker.sections.ranges import RangeOutput
from makara.worker.trainer import trainer
from torch import Tensor

TIMES = Path(os.environ["MAKARA_BENCHMARK_TIMES"])

_run = Executor.run
_step = Stepper.step
_rendezvous = Session.rendezvous
_generation = 0


class _Timed(Sink):
    def __init__(self, inner: Sink) -> None:
        self._inner = inner
        self._is_first = True

    def forwarded(self, micro_batch: int, output: RangeOutput) -> None:
        if self._is_first:
            self._is_first = False
            _note("forwarded")
        self._inner.forwarded(micro_batch, output)

    def gradient(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        self._inner.gradient(micro_batch, section, name, gradient)

    def section_done(self, micro_batch: int, section: int) -> None:
        self._inner.section_done(micro_batch, section)


def run(self: Executor, step: int, sink: Sink) -> Work:
    return _run(self, step, _Timed(sink))


def step(self: Stepper, ballot: CommitRequest) -> StepResult:
    _note("began")
    result = _step(self, ballot)
    _note("committed")
    return result


def rendezvous(self: Session) -> None:
    global _generation
    _generation = self.number
    _rendezvous(self)


def _note(what: str) -> None:
    with TIMES.open("a") as file:
        file.write(f"{what} {_generation} {time.monotonic()}\n")


if __name__ == "__main__":
    Executor.run = run
    Stepper.step = step
    Session.rendezvous = rendezvous
    trainer.main()
