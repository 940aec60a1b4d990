"""A model in sections against the same model as it is: loss, gradients and buffers of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from eager_runs import PreciseModel
from makara.model.data import Batches
from makara.model.partition.partition import Sections, split
from makara.model.precision import Precision
from makara.model.tracing.trace import TracedModel, trace
from makara.model.training import Training
from torch import Tensor, nn
from whole_runtime import gradients_of, whole_runtime

WIDTH = 4


class Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, WIDTH) * (index + 1)}


def training_of(model: Callable[[], nn.Module], **fields: Any) -> Training:
    """Of `model`, which takes rows `x`; the loss is a function of all that it returns."""
    return Training(
        **{
            "model": model,
            "loss": lambda output, batch: sum(
                (leaf.float() ** 2).mean()
                for leaf in torch.utils._pytree.tree_leaves(output)
                if _counts(leaf)
            ),
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            "dataset": Rows,
            **fields,
        }
    )


def agree(
    training: Training,
    cuts: Sequence[int] = (),
    rtol: float = 1e-5,
    precision: Precision = "fp32",
    traced: TracedModel | None = None,
) -> Sections:
    """Asserts that the sections between `cuts` give what the user's own module gives; returns them.

    `traced`: of this training, where it is at hand.
    """
    traced = trace(training, 4, 1, precision) if traced is None else traced
    chain = split(traced, cuts)
    runtime = whole_runtime(chain, training, 1)
    batches = Batches(training.dataset(), 1, 4, 4)
    output = runtime.forward(0, 0, 0, chain.num_sections, {}, batches.micro_batch(0, 0), keep=True)
    gradients = gradients_of(runtime)
    expected = PreciseModel(training, traced, batches, seed=1, precision=precision).step(0)
    assert output.piece is not None
    assert output.piece.loss_sum == pytest.approx(expected.loss, rel=rtol)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=rtol, atol=1e-7)
    for name, value in output.updates.items():
        torch.testing.assert_close(value, expected.buffers[name], rtol=rtol, atol=1e-7)
    return chain


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
