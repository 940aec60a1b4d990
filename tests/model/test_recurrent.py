"""Layers of an LSTM, GRU or RNN become operations of their own, with the bits of torch's one operation."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker import Training
from makara.worker.check.check import CheckSettings, check
from torch import Tensor, nn


class Words(nn.Module):
    """Uses both what a recurrent module gives for each word and its last state."""

    def __init__(self, kind: Callable[..., nn.RNNBase], both_ways: bool, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(networks.WORDS, 8)
        self.rnn = kind(8, 8, 3, bidirectional=both_ways, batch_first=batch_first, dropout=0.2)
        self.head, self.state = nn.Linear(8 + 8 * both_ways, networks.WORDS), nn.Linear(8, networks.WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        output, last = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        output = output if self.rnn.batch_first else output.transpose(0, 1)
        state = last[0] + last[1] if isinstance(last, tuple) else last
        return self.head(output) + self.state(state.sum(0))[:, None]


def words(kind: Callable[..., nn.RNNBase], both_ways: bool, batch_first: bool) -> Training:
    return dataclasses.replace(networks.lstm(), model=lambda: Words(kind, both_ways, batch_first))


def chain_of(training: Training, **choice: Any) -> Sections:
    traced = trace(training, 1)
    return split(traced, choose_cuts(traced, **choice))


def test_an_lstm_of_several_layers_is_cut_between_them() -> None:
    chain = chain_of(networks.lstm(layers=4))
    assert chain.num_sections >= 4
    for section in chain.sections:
        assert len({name[-1] for name in section.parameters if name.startswith("lstm.")}) <= 1
    labels = [section.label.split(" (")[0] for section in chain.sections]
    assert labels == ["embed", "lstm.l0", "lstm.l1", "lstm.l2", "lstm.l3", "head"]


def test_a_layer_can_be_named_for_a_cut() -> None:
    chain = chain_of(networks.lstm(layers=4), marks=["lstm.l2"])
    assert [len(section.parameters) for section in chain.sections] == [1 + 2 * 4, 2 * 4 + 2]


def test_one_layer_is_left_as_it_is() -> None:
    graph = trace(networks.lstm(0.0, layers=1), 1).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.lstm.input)
    assert len(node.users) == 3
    assert all(user.target is operator.getitem for user in node.users)


@pytest.mark.parametrize(
    ("kind", "both_ways", "batch_first"),
    [
        (nn.LSTM, True, False),
        (nn.RNN, False, False),
        pytest.param(nn.LSTM, False, True, marks=pytest.mark.soak),
        pytest.param(nn.GRU, True, True, marks=pytest.mark.soak),
    ],
)
def test_a_step_by_layers_is_the_modules_own_to_the_bit_dropout_on(
    kind: Callable[..., nn.RNNBase], both_ways: bool, batch_first: bool
) -> None:
    report = check(words(kind, both_ways, batch_first), CheckSettings(), Path(__file__).parents[1])
    assert report["findings"] == []
    assert report["num_sections"] >= 3
    assert report["largest_differences"] == {"loss": 0.0, "gradient": 0.0, "weight after the step": 0.0}


def test_layers_have_the_types_that_autocast_gives_them() -> None:
    traced = trace(networks.lstm(), 1, precision="bf16")
    chain = split(traced, choose_cuts(traced))
    assert chain.num_sections >= 4
