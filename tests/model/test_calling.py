"""How the model is called: entries of samples, constants, no caches; the loss sees what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from makara.model.data import Batches
from makara.model.errors import UserCodeError
from makara.model.partition.partition import split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.check.eager import EagerModel
from makara.worker.sections.ranges import RangeRuntime
from torch import Tensor, nn


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), index / 8.0), "y": torch.ones(4)}


class Scaled(nn.Module):
    """Returns nested containers with None and a number among them, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        scale: float = 1.0,
        mode: str = "plain",
        y: Tensor | None = None,
        use_cache: bool = True,
    ) -> dict[str, Any]:
        assert not use_cache
        out = self.layer(x) * scale
        if mode == "shifted":
            out = out + 1
        return {"out": (out, [out.sum(), None]), "size": 4, "y": y, "none": None}


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    out, (total, nothing) = output["out"]
    assert nothing is None
    assert output["none"] is None
    assert output["size"] == 4
    return (out - output["y"]).square().mean() + 0.01 * total


def training_of(**fields: Any) -> Training:
    return Training(
        **{
            "model": Scaled,
            "loss": loss,
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            "dataset": Numbers,
            **fields,
        }
    )


def losses(training: Training) -> tuple[float, float]:
    """(in sections, by the user's own module)"""
    traced = trace(training, 2, 1)
    chain = split(traced, [])
    runtime = RangeRuntime(chain, training, 1)
    runtime.host(0)
    batches = Batches(training.dataset(), 1, 2, 2)
    output = runtime.forward(0, 0, 0, 1, {}, batches.micro_batch(0, 0), keep=True)
    assert output.piece is not None
    return output.piece.loss_sum, EagerModel(training, traced, batches, seed=1).step(0).loss


def test_constants_reach_forward() -> None:
    plain, _ = losses(training_of())
    ours, eager = losses(training_of(forward_kwargs={"scale": 3.0, "mode": "shifted"}))
    assert ours == pytest.approx(eager, rel=1e-6)
    assert ours != pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"scael": 2.0}, r"no argument 'scael'; it takes \['x', 'scale'"),
        ({"y": 1}, "'y' is an entry of the samples as well"),
    ],
)
def test_a_constant_that_forward_does_not_take_is_named(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        trace(training_of(forward_kwargs=constants), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_kwargs": ["scale"]}, "forward_kwargs: expected a dict"),
        ({"forward_kwargs": {1: 2}}, "forward_kwargs: expected names"),
        ({"forward_kwargs": {"y": torch.ones(2)}}, "'y' is a tensor; make it a buffer"),
        ({"average_buffers": "mean"}, "average_buffers: expected a list of names, got str"),
        ({"average_buffers": [3]}, "average_buffers: expected names, got int"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        training_of(**fields)


def with_default_cache(name: str) -> Training:
    """A model as its config makes it: train mode, dropout, and `use_cache` on by default."""
    from user_models import LENGTH, VOCABULARY, Pairs, Texts

    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **small)
        model: Callable[[], nn.Module] = lambda: transformers.GPT2LMHeadModel(config)  # noqa: E731
    else:
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **small
        )
        model = lambda: transformers.T5ForConditionalGeneration(config)  # noqa: E731

    def own_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        assert type(output).__name__ in ("CausalLMOutputWithCrossAttentions", "Seq2SeqLMOutput")
        assert output.past_key_values is None
        assert output.logits.shape[-1] == VOCABULARY
        return output.loss if output.loss is not None else output.logits.square().mean()

    return training_of(model=model, loss=own_loss, dataset=Texts if name == "gpt2" else Pairs)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transformers_are_called_without_caches_and_give_their_own_type(name: str) -> None:
    ours, _ = losses(with_default_cache(name))
    assert ours > 0
