"""Measured prices: each distinct operation once, the heaviest first, in bounds; the rest at their rate."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from makara.model.partition import prices
from makara.model.partition.cuts import choose_cuts
from makara.model.partition.flops import compute_nodes, signature, work_per_node
from makara.model.partition.prices import measured_prices
from makara.model.tracing.trace import trace
from models import VOCABULARY, masked_loss, skip_model, tied_gpt
from torch import Tensor, fx, nn

CPU = torch.device("cpu")


class Ticks:
    """A clock that advances by one with every look: a run of an operation takes one tick."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def __call__(self) -> float:
        return float(next(self._ticks))


class Gambling(nn.Module):
    """An operation that takes probabilities only: random numbers do not do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        return {"logits": self.out(x + torch.bernoulli(x.sigmoid())), "first": x}


def gpt_nodes() -> list[fx.Node]:
    return compute_nodes(trace(tied_gpt(), 2).graph)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "MIN_WORK", 0.0)


def test_a_tiny_model_is_counted_not_measured() -> None:
    assert measured_prices(gpt_nodes(), CPU) is None


@pytest.mark.usefixtures("any_size")
def test_equal_operations_are_run_once_and_cost_the_same() -> None:
    nodes = gpt_nodes()
    found = measured_prices(nodes, CPU, seconds=10_000.0, clock=Ticks())
    assert found is not None
    by_form: dict[object, set[float]] = {}
    for node, price in zip(nodes, found, strict=True):
        by_form.setdefault(signature(node), set()).add(price)
    assert all(len(prices) == 1 for prices in by_form.values())
    layers = [price for node, price in zip(nodes, found, strict=True) if "linear" in str(node.target)]
    assert set(layers) == {1.0}


@pytest.mark.usefixtures("any_size")
def test_out_of_time_the_rest_is_priced_at_the_rate_of_what_was_run() -> None:
    nodes = gpt_nodes()
    work = work_per_node(nodes, "fp32")
    found = measured_prices(nodes, CPU, seconds=3.0, clock=Ticks())
    assert found is not None
    run = {signature(node) for node, price in zip(nodes, found, strict=True) if price == 1.0}
    assert len(run) == 1
    [heaviest] = {cost for node, cost in zip(nodes, work, strict=True) if signature(node) in run}
    assert found == pytest.approx([cost / heaviest for cost in work])


@pytest.mark.usefixtures("any_size")
def test_what_is_too_big_or_does_not_run_by_itself_is_counted() -> None:
    assert measured_prices(gpt_nodes(), CPU, memory_bytes=0) is None
    training = dataclasses.replace(skip_model(), model=Gambling, loss=masked_loss)
    nodes = compute_nodes(trace(training, 2).graph)
    state = torch.get_rng_state()
    found = measured_prices(nodes, CPU, clock=Ticks(), seconds=10_000.0)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), state)
    work = work_per_node(nodes, "fp32")
    gamble = next(number for number, node in enumerate(nodes) if "bernoulli" in str(node.target))
    assert work[gamble] > 0
    assert 0 < found[gamble] != 1.0


@pytest.mark.usefixtures("any_size")
def test_cuts_are_chosen_by_real_times() -> None:
    traced = trace(tied_gpt(), 2)
    found = measured_prices(compute_nodes(traced.graph), CPU)
    assert found is not None
    assert len(choose_cuts(traced, 4, work=found)) == 3
