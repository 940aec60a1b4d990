"""Models of which parts are frozen: users' own (`user_models`), and one that brings what these do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from makara.worker import Training
from models import CONTEXT, VOCABULARY, Tokens, next_token_loss
from torch import Tensor, nn
from user_models import ZOO


def frozen(entry: str, part: str, dropout: float = 0.1) -> Training:
    """`ZOO[entry]` with a part of its parameters frozen: see `PARTS`."""
    return _frozen(ZOO[entry](dropout), PARTS[part])


def frozen_by_sgd(entry: str, part: str) -> Training:
    """The same without dropout, by SGD with momentum, for comparisons in floating point."""
    return dataclasses.replace(
        frozen(entry, part, 0.0), optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9)
    )


def _first_half(names: Sequence[str]) -> set[str]:
    return set(names[: len(names) // 2])


def _middle(names: Sequence[str]) -> set[str]:
    return set(names[len(names) // 4 : -len(names) // 4])


def _last_half(names: Sequence[str]) -> set[str]:
    return set(names[len(names) // 2 :])


def _all_but_a_bias(names: Sequence[str]) -> set[str]:
    """The last one."""
    return set(names) - {[name for name in names if name.endswith("bias")][-1]}


def _all_but_the_first(names: Sequence[str]) -> set[str]:
    return set(names[1:])


PARTS: Mapping[str, Callable[[Sequence[str]], set[str]]] = {
    "beginning": _first_half,
    "middle": _middle,
    "end": _last_half,
    "all but a bias": _all_but_a_bias,
    "all but the first": _all_but_the_first,
}


def _frozen(training: Training, chosen: Callable[[Sequence[str]], set[str]]) -> Training:
    def model() -> nn.Module:
        made = training.model()
        names = [name for name, _ in made.named_parameters()]
        for name in chosen(names):
            made.get_parameter(name).requires_grad_(False)
        return made

    return dataclasses.replace(training, model=model)


class Probe(nn.Module):
    """A frozen trunk with batch norms, whose statistics move all the same, under one linear layer. The
    trunk's first and last layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(CONTEXT) for _ in range(6))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(torch.relu(norm(layer(x))), 0.1, self.training)
        return self.out(x)


def probe() -> Training:
    return Training(
        model=Probe,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        dataset=Tokens,
        clip_grad_norm=1.0,
    )
