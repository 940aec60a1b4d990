"""What a backward in halves costs beyond a whole one: a block of a transformer, as a worker runs it.

Whole and in halves take turns on the same section, each after a forward of its own, and either goes first in
every other pair; the ratio is that of pairs.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from makara.model.partition.partition import choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.worker.agent.trainer_process import ALLOCATOR
from makara.worker.sections.grad_sums import new_sum
from makara.worker.sections.ranges import RangeRuntime, configure_torch
from torch import Tensor

from .emulated.fleet import in_fresh_process
from .memory_models import CONTEXT, transformer
from .report import Row

PAIRS = 20
WIDTHS = (768, 1024)
HEAD_WIDTH = 64
LAYERS = 3
BLOCK = 1
"""The section that is measured: cut into as many as there are blocks, it is one of them alone."""
NUM_MICRO_BATCHES = 8
SEED = 3
TITLE = f"a backward of a transformer's block, whole and in halves, with sums: medians of {PAIRS} pairs"


def rows() -> list[Row]:
    return in_fresh_process(_rows, environment=ALLOCATOR)


def _rows() -> list[Row]:
    configure_torch(1, "exact")
    return [_row(precision, width, m) for precision in ("fp32", "bf16") for width in WIDTHS for m in (1, 4)]


def _row(precision: Precision, width: int, m: int) -> Row:
    block = _Block(precision, width, m)
    pairs = [block.pair(number) for number in range(2 + PAIRS)][2:]
    whole_s, input_s, weight_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "width": width,
        "precision": precision,
        "tokens": m * CONTEXT,
        "B ms": 1e3 * whole_s,
        "I ms": 1e3 * input_s,
        "W ms": 1e3 * weight_s,
        "(I + W) / B": statistics.median((first + second) / whole for whole, first, second in pairs),
    }


class _Block:
    """One block on random values, whose gradients are added to sums, with `exact`."""

    def __init__(self, precision: Precision, width: int, m: int) -> None:
        training = transformer(LAYERS, width, width // HEAD_WIDTH)
        traced = trace(training, m, SEED, precision)
        chain = split(traced, choose_cuts(traced, LAYERS))
        self._runtime = RangeRuntime(chain, training, SEED)
        self._runtime.host(BLOCK)
        names = chain.sections[BLOCK].trainable
        self._sums = new_sum(chain, names, NUM_MICRO_BATCHES, "exact", "cpu")
        self._sums.reset(dict.fromkeys(names, 1.0))
        self._values = {value.name: torch.randn(value.shape) for value in chain.inputs_of(BLOCK)}
        self._gradients = {value.name: torch.randn(value.shape) for value in chain.outputs_of(BLOCK + 1)}

    def pair(self, number: int) -> tuple[float, float, float]:
        """Seconds of B, of I and of W."""
        if number % 2:
            return (self._whole(), *self._halves())
        input_s, weight_s = self._halves()
        return self._whole(), input_s, weight_s

    def _whole(self) -> float:
        self._forward()
        began = time.perf_counter()
        self._runtime.backward(0, BLOCK, self._gradients, self._add)
        return time.perf_counter() - began

    def _halves(self) -> tuple[float, float]:
        self._forward()
        began = time.perf_counter()
        self._runtime.input_gradients(0, BLOCK, self._gradients)
        between = time.perf_counter()
        self._runtime.weight_gradients(0, BLOCK, self._add)
        return between - began, time.perf_counter() - between

    def _forward(self) -> None:
        self._runtime.forward(0, 0, BLOCK, BLOCK + 1, self._values, {}, keep=True)

    def _add(self, _: Any, name: str, gradient: Tensor) -> None:
        self._sums.add(name, gradient)
