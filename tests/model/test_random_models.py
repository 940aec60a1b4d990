"""Random small models at random cuts: the chain of sections computes what the whole graph computes, forward
and backward. hypothesis prints what to repeat on a failure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.model.data import Batches
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import Sections, split
from makara.model.partition.places import crossing_bytes
from makara.model.partition.rematerialized import find_derived
from makara.model.tracing.trace import TracedModel, trace
from models import CONTEXT, VOCABULARY, skip_model
from torch import Tensor, nn
from whole_runtime import gradients_of, whole_runtime

WIDTH = 8
M = 2
KINDS = (
    *("linear", "linear", "add", "gelu", "mask", "bias", "frozen", "detached", "in place", "halves"),
    *("no grad", "sum", "transposed"),
)
Step = tuple[str, int, int]  # what to do, on which earlier values (counted from the end, modulo their number)


class Woven(nn.Module):
    """Values in a row, each made from two earlier ones; three weights for all, so that they are shared."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Embedding(4, 1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        keep = (tokens % 3 != 0).unsqueeze(-1)
        bias = self.table(torch.arange(CONTEXT) % 4)
        values = [self.embed(tokens) + self.offset]
        for number, (kind, a, b) in enumerate(self.steps):
            x, y = values[-1 - a % len(values)], values[-1 - b % len(values)]
            values.append(self.step(kind, x, y, keep, bias, self.layers[number % 3]))
        return {"last": values[-1], "also": (values[len(values) // 2], None), "keep": keep}

    def step(self, kind: str, x: Tensor, y: Tensor, keep: Tensor, bias: Tensor, layer: nn.Module) -> Tensor:
        match kind:
            case "linear":
                return layer(x)
            case "add":
                return x + y
            case "gelu":
                return F.gelu(x)
            case "mask":
                return x * keep + y * 0.1
            case "bias":
                return x + torch.where(keep, bias, -1.0)
            case "frozen":
                return x * self.scale
            case "detached":
                return x.detach() * 0.1 + y
            case "in place":
                made = x * 1.5
                made += y
                return made
            case "halves":
                first, second = y.chunk(2, -1)
                return x + torch.cat([second, first], -1)
            case "no grad":
                with torch.no_grad():
                    size = x.abs().mean()
                return y * size
            case "sum":
                return x / (1 + y.square().sum(-1, keepdim=True))
            case "transposed":
                return x + (y.transpose(0, 1) * 0.5).transpose(0, 1)
        raise AssertionError(kind)


def loss(output: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    first = output["also"][0]
    wanted = batch["targets"].unsqueeze(-1) / VOCABULARY
    return ((output["last"] - wanted).square() * output["keep"]).mean() + 0.1 * first.square().mean()


@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=10
    ),
    seed=st.integers(0, 1000),
)
def test_a_chain_computes_what_the_whole_graph_computes(steps: list[Step], seed: int) -> None:
    training = dataclasses.replace(skip_model(), model=lambda: Woven(steps), loss=loss)
    traced = trace(training, M)
    batch = Batches(training.dataset(), 0, M, M).micro_batch(0, 0)
    whole_loss, whole = run(split(traced, []), training, batch)
    shuffle = random.Random(seed)
    allowed = places(traced)
    for _ in range(3):
        cuts = sorted(shuffle.sample(allowed, shuffle.randint(0, len(allowed))))
        chain = split(traced, cuts)
        found_loss, found = run(chain, training, batch)
        assert found_loss == whole_loss
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
        assert set(chain.parameter_names) == {
            name for section in chain.sections for name in section.parameters
        }


def places(traced: TracedModel) -> list[int]:
    nodes = compute_nodes(traced.graph)
    crossing = crossing_bytes(nodes, find_derived(traced))
    return [position for position in range(1, len(nodes)) if crossing[position] is not None]


def run(chain: Sections, training: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one micro-batch, each section on its own."""
    runtime = whole_runtime(chain, training, 0)
    output = runtime.forward(0, 0, 0, chain.num_sections, {}, batch, keep=True)
    assert output.piece is not None
    return output.piece.loss_sum, gradients_of(runtime)
