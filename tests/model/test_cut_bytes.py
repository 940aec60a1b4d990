"""What crosses the cuts of transformers: the hidden state alone, and the encoder's output beside it in a
decoder; masks, positions and position biases are made where they are needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import user_models
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training

M = 2
HIDDEN = (M, user_models.LENGTH, user_models.WIDTH)


def chain_of(make: Callable[[float], Training]) -> Sections:
    traced = trace(make(0.1), M)
    return split(traced, choose_cuts(traced))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (user_models.gpt2, HIDDEN),
        (user_models.llama, HIDDEN),
        (user_models.bert, HIDDEN),
        (user_models.vit, (M, 17, user_models.WIDTH)),
    ],
    ids=["gpt2", "llama", "bert", "vit"],
)
def test_one_hidden_state_crosses(make: Callable[[float], Training], shape: tuple[int, ...]) -> None:
    chain = chain_of(make)
    assert chain.num_sections >= 8
    for values in chain.crossing:
        assert [(value.shape, value.dtype, value.needs_grad) for value in values] == [
            (shape, "float32", True)
        ]


def test_t5_sends_the_encoders_output_beside_the_decoders_state_and_shares_its_position_bias() -> None:
    chain = chain_of(user_models.t5)
    kinds = [[value.shape for value in values] for values in chain.crossing]
    labels = (M, 8, user_models.WIDTH)
    in_encoder = kinds.index([HIDDEN, labels])
    assert in_encoder >= 4
    assert kinds == [[HIDDEN]] * in_encoder + [[HIDDEN, labels]] * (len(kinds) - in_encoder)
    for half in ("encoder", "decoder"):
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert len(chain.shared[bias]) == 3, "every self-attention makes the bias for itself"
