"""Runs of a user's own module, in the job's precision and with loss scaling, as they would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from makara.model.data import Batches
from makara.model.precision import Precision, autocast
from makara.model.tracing.trace import TracedModel
from makara.model.training import Training
from makara.worker.check.eager import EagerModel
from torch import Tensor


class PreciseModel(EagerModel):
    """Under autocast; `loss_scale` multiplies the loss before its backward, and divides the gradients."""

    def __init__(
        self,
        training: Training,
        traced: TracedModel,
        batches: Batches,
        *,
        seed: int = 0,
        precision: Precision = "fp32",
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(training, traced, batches, seed=seed)
        self._precision: Precision = precision
        self._loss_scale = loss_scale

    def output(self, batch: Mapping[str, Tensor]) -> Any:
        with autocast("cpu", self._precision):
            return super().output(batch)

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Any:
        with autocast("cpu", self._precision):
            loss: Any = super().loss(output, batch)
        total, weight = loss if isinstance(loss, tuple) else (loss, 1.0)
        return total * self._loss_scale, weight * self._loss_scale


def run_eager(model: EagerModel, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """(loss of each step, weights and buffers by name) of training the user's module with its own
    optimizer."""
    losses: list[float] = []
    for step in range(steps):
        result = model.step(step)
        model.apply(step, result.gradients, result.buffers)
        losses.append(result.loss)
    tensors = [*model.module.named_parameters(), *model.module.named_buffers()]
    return losses, {name: tensor.detach().clone() for name, tensor in tensors}
