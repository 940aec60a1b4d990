"""A worker that hosts all sections of a model."""

from __future__ import annotations

import torch
from makara.model.partition.partition import Sections
from makara.model.training import Training
from makara.worker.sections.ranges import RangeRuntime
from torch import Tensor


def whole_runtime(
    chain: Sections, training: Training, seed: int, device: torch.device | str = "cpu"
) -> RangeRuntime:
    runtime = RangeRuntime(chain, training, seed, device)
    for index in range(chain.num_sections):
        runtime.host(index)
    return runtime


def gradients_of(runtime: RangeRuntime) -> dict[str, Tensor]:
    """The gradients of micro-batch 0, whose forward has run; those of a shared parameter are added up."""
    found: dict[str, Tensor] = {}

    def add(_section: int, name: str, gradient: Tensor) -> None:
        found[name] = found[name] + gradient if name in found else gradient

    runtime.backward(0, 0, {}, add)
    return found
