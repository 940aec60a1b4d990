"""What nothing changes is computed once for a section; what is random, state or large is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from makara.model.data import Batches
from makara.model.partition.constant_folding import KEPT_BYTES
from makara.model.partition.partition import split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections import runtime
from makara.worker.sections.runtime import SectionRuntime
from models import CONTEXT, VOCABULARY, skip_model
from torch import Tensor, nn


class Positioned(nn.Module):
    """A causal mask, a table that is no state, a statistic that is, and noise."""

    def __init__(self, size: int = CONTEXT) -> None:
        super().__init__()
        self.size = size
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("angles", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        order = torch.arange(self.size)
        mask = (order.unsqueeze(1) >= order).float()[:CONTEXT, :CONTEXT]
        turned = self.angles.cos() * torch.arange(CONTEXT).unsqueeze(1)
        noise = torch.rand(8)
        x = mask @ (self.embed(tokens) * turned) - self.centre.exp() + noise
        return {"logits": self.out(x), "first": x, "order": order}


def section(training: Training) -> SectionRuntime:
    return SectionRuntime(split(trace(training, 2), []), 0, training, 0)


def training_of(size: int = CONTEXT) -> Training:
    return dataclasses.replace(skip_model(), model=lambda: Positioned(size))


def test_masks_and_tables_are_kept_and_the_rest_is_computed() -> None:
    runtime = section(training_of())
    left = " ".join(runtime.operations)
    assert "aten.ge" not in left
    assert "aten.cos" not in left
    assert "aten.rand" in left, "each micro-batch has its own noise"
    assert "aten.exp" in left, "what is loaded from a checkpoint is not known yet"
    assert "aten.arange" in left, "the user's loss may write what it gets"
    assert {tuple(tensor.shape) for tensor in runtime.folded} >= {(CONTEXT, CONTEXT), (CONTEXT, 8)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_random_only_with_dropout(dropout: float) -> None:
    """Found: attention without dropout was computed for every micro-batch, like random numbers."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            order = torch.arange(CONTEXT * 8.0).view(1, 1, CONTEXT, 8)
            mixed = nn.functional.scaled_dot_product_attention(order, order, order, dropout_p=dropout)
            return {"logits": self.out(self.embed(tokens) + mixed[0, 0])}

    training = dataclasses.replace(
        skip_model(), model=Fixed, loss=lambda output, batch: output["logits"].square().mean()
    )
    left = " ".join(section(training).operations)
    assert ("scaled_dot_product_attention" in left) == (dropout > 0)


def test_large_values_are_not_kept() -> None:
    runtime = section(training_of(3000))
    assert any("aten.ge" in name for name in runtime.operations)
    assert all(tensor.untyped_storage().nbytes() <= KEPT_BYTES for tensor in runtime.folded)


def test_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_of()
    batch = Batches(training.dataset(), 0, 2, 2).micro_batch(0, 0)
    with_folding = gradients(training, batch)
    monkeypatch.setattr(runtime, "fold", lambda module, *_: (module, []))
    for name, gradient in gradients(training, batch).items():
        assert torch.equal(gradient, with_folding[name])


def gradients(training: Training, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    runtime = section(training)
    return runtime.backward(runtime.forward(0, 0, {}, batch).saved, {})[1]
