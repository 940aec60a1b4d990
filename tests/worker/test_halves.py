"""A backward in two operations has the bits of the whole one, for every model of the matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from in_process import same_bits
from makara.model.data import Batches
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections import halves
from makara.worker.sections.ranges import configure_torch
from makara.worker.sections.runtime import SectionOutput, SectionRuntime, WeightsLater
from models import VOCABULARY, next_token_loss, tied_gpt
from torch import Tensor, nn
from user_models import ZOO
from whole_runtime import whole_runtime
from zoo_names import ZOO_NAMES

M, SEED = 2, 3


def backwards(training: Training, chain: Sections, *, in_halves: bool) -> tuple[list[dict[str, Tensor]], int]:
    """(each section's gradients of inputs and parameters, how many sections were split)."""
    sections = [SectionRuntime(chain, index, training, SEED) for index in range(chain.num_sections)]
    found: list[dict[str, Tensor]] = [{} for _ in sections]
    num_split = 0
    batches = Batches(training.dataset(), SEED, 2 * M, M)
    for micro_batch in range(2):  # the second finds the graph cut as the first
        batch = batches.micro_batch(0, micro_batch)
        values: dict[str, Tensor] = {}
        outputs: list[SectionOutput] = []
        for section in sections:
            outputs.append(section.forward(0, micro_batch, values, batch))
            values = values | outputs[-1].values
        flowing: dict[str, Tensor] = {}
        later: list[tuple[int, WeightsLater]] = []
        for section, output in reversed(list(zip(sections, outputs, strict=True))):
            own = {name: flowing.pop(name) for name in section.info.outputs if name in flowing}
            if in_halves:
                inputs, weights = section.input_gradients(output.saved, own)
                later.append((section.info.index, weights))
            else:
                inputs, parameters = section.backward(output.saved, own)
                found[section.info.index] |= {f"{micro_batch} {n}": g for n, g in parameters.items()}
            found[section.info.index] |= {f"{micro_batch} into {n}": g for n, g in inputs.items()}
            for name, gradient in inputs.items():
                flowing[name] = flowing[name] + gradient if name in flowing else gradient
        for index, weights in later:
            found[index] |= {f"{micro_batch} {n}": g for n, g in weights().items()}
    if in_halves:
        num_split = sum(section.split is not None for section in sections)
    return found, num_split


def expect_same_bits(training: Training, precision: Precision = "fp32") -> int:
    configure_torch(1, "exact")
    traced = trace(training, M, SEED, precision)
    chain = split(traced, choose_cuts(traced, None))
    whole, _ = backwards(training, chain, in_halves=False)
    parts, num_split = backwards(training, chain, in_halves=True)
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        assert all(same_bits(one[name], other[name]) for name in one)
    return num_split


class Rounded(torch.autograd.Function):
    """A product whose gradients are rounded up or down at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        into_x, into_weight = gradients[0] @ weight, gradients[0].flatten(0, -2).T @ x.flatten(0, -2)
        return _rounded(into_x), _rounded(into_weight)


def _rounded(x: Tensor) -> Tensor:
    return torch.floor(x * 4096 + torch.rand_like(x)) / 4096


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.dropout(torch.tanh(Rounded.apply(x, layer.weight)), 0.1, self.training)
        return self.head(x)


class ChannelsLast(nn.Module):
    """Group norms of tokens whose features come last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).unsqueeze(1)
        for norm in self.norms:
            x = x + norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(x.squeeze(1))


def test_group_norms_of_channels_last_memory_are_run_in_halves() -> None:
    """Found: the process ended by a signal."""
    assert expect_same_bits(replace(tied_gpt(), model=ChannelsLast)) > 0


def test_random_numbers_of_a_backward_do_not_depend_on_halves() -> None:
    expect_same_bits(replace(tied_gpt(), model=Noisy))


def test_random_numbers_of_a_backward_do_not_depend_on_what_ran_before() -> None:
    training = replace(tied_gpt(), model=Noisy)
    traced = trace(training, M, SEED)
    chain = split(traced, choose_cuts(traced, 2))
    batches = Batches(training.dataset(), SEED, 2 * M, M)

    def gradients(*, forwards_first: bool, recompute: bool) -> dict[str, Tensor]:
        runtime = whole_runtime(chain, training, SEED)
        found: dict[str, Tensor] = {}
        for micro_batch in range(2):
            batch = batches.micro_batch(0, micro_batch)
            runtime.forward(0, micro_batch, 0, chain.num_sections, {}, batch, keep=not recompute)
            if forwards_first:
                continue
            if recompute:
                runtime.recompute(micro_batch, 0)
            runtime.backward(micro_batch, 0, {}, lambda _, n, g, i=micro_batch: found.update({f"{i} {n}": g}))
        for micro_batch in range(2 if forwards_first else 0):
            runtime.backward(micro_batch, 0, {}, lambda _, n, g, i=micro_batch: found.update({f"{i} {n}": g}))
        return found

    one = gradients(forwards_first=False, recompute=False)
    for other in (
        gradients(forwards_first=True, recompute=False),
        gradients(forwards_first=False, recompute=True),
    ):
        assert one.keys() == other.keys()
        assert all(same_bits(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ZOO_NAMES)
def test_halves_have_the_bits_of_the_whole(name: str) -> None:
    assert expect_same_bits(ZOO[name](0.1)), "no section was split"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_so_do_they_under_autocast(precision: Precision) -> None:
    assert expect_same_bits(tied_gpt(), precision)


class Twice(nn.Module):
    """A layer that is used twice, in one section."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(self.layer(torch.tanh(self.layer(x))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.Linear(8, 8)
        self.one = nn.Linear(8, VOCABULARY)
        self.other = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.layer(self.table(tokens)))
        return self.one(x), self.other(x)


@pytest.mark.parametrize("longer", [False, True])
def test_a_loss_may_compute_each_micro_batch_another_way(longer: bool) -> None:
    """Found: the first graph told for all: parameters that it had not used got no gradient."""
    base = tied_gpt()
    first = Batches(base.dataset(), SEED, 2 * M, M).micro_batch(0, 0)

    def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        if all(torch.equal(batch[name], first[name]) for name in first):
            return next_token_loss(output[0], batch)
        return next_token_loss(torch.tanh(output[1]) * 2 if longer else output[1], batch)

    assert expect_same_bits(replace(base, model=TwoHeads, loss=loss))


def test_a_section_that_uses_a_parameter_twice_stays_whole() -> None:
    expect_same_bits(replace(tied_gpt(), model=Twice))
    x = torch.randn(3, 8, requires_grad=True)
    layer = nn.Linear(8, 8)
    y = layer(torch.tanh(layer(x)))
    with pytest.raises(halves.CannotSplit, match="weight"):
        halves.find_split([y], [x], dict(layer.named_parameters()))


def test_a_fused_recurrent_network_stays_whole() -> None:
    x = torch.randn(3, 2, 8, requires_grad=True)
    lstm = nn.LSTM(8, 8)
    with pytest.raises(halves.CannotSplit, match="weight"):
        halves.find_split([lstm(x)[0]], [x], dict(lstm.named_parameters()))
