"""Small models and data for tests: tied and untied, with values that skip sections, plain and masked
losses."""

from __future__ import annotations

import dataclasses
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

NAP_S = 0.024
NO_NAPS = "NO_NAPS"  # names a file; from when it exists on, nobody naps
LONG_NAPS_FROM = (
    "LONG_NAPS_FROM"  # a step: once it was applied, naps are long, so that the job does not end yet
)
LONGER = 10
VOCABULARY = 48
CONTEXT = 12


_naps = 1


@torch.library.custom_op("makara_tests::nap", mutates_args=())
def nap(x: Tensor, seconds: float) -> Tensor:
    """A copy of `x` after `seconds` asleep; its gradient takes as long."""
    if not os.path.exists(os.environ.get(NO_NAPS, "")):
        time.sleep(seconds * _naps)
    return x.clone()


@nap.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep_seconds(ctx, inputs, output) -> None:
    ctx.seconds = inputs[1]


def _nap_backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    return nap(gradient.contiguous(), ctx.seconds), None


nap.register_autograd(_nap_backward, setup_context=_keep_seconds)


class Block(nn.Module):
    """Attention and a perceptron; after each of them a nap, unless `nap_s` is None."""

    def __init__(self, width: int, heads: int, dropout: float, nap_s: float | None) -> None:
        super().__init__()
        self.heads, self.dropout, self.nap_s = heads, dropout, nap_s
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        mixed = self.project(mixed.transpose(1, 2).reshape(x.shape))
        x = self.rest(x + F.dropout(mixed, self.dropout, self.training))
        hidden = self.contract(F.gelu(self.expand(self.norm2(x))))
        return self.rest(x + F.dropout(hidden, self.dropout, self.training))

    def rest(self, x: Tensor) -> Tensor:
        return x if self.nap_s is None else nap(x, self.nap_s)


class TiedGPT(nn.Module):
    """Four layers of width 32; the output layer is the embedding."""

    def __init__(
        self, layers: int = 4, width: int = 32, dropout: float = 0.1, nap_s: float | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout, nap_s) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(CONTEXT))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UntiedMLP(nn.Module):
    """No shared weights, no random numbers, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [CONTEXT, 24, 24, 24, 24]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(24, VOCABULARY)
        self.scale = nn.Parameter(torch.full((24,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float() / VOCABULARY
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + self.scale)
        return self.out(x)


class SkipModel(nn.Module):
    """An early value is used by several later layers, some of it without gradient, and returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        first = self.embed(tokens)
        keep = (tokens % 3 != 0).unsqueeze(-1)
        x = first
        for number, layer in enumerate(self.layers):
            x = F.dropout(F.gelu(layer(x)), 0.1, self.training) + first * (0.1 * number)
            x = x * keep
            x += first.detach() * 0.01
        return {"logits": self.out(x), "first": first}


class Tokens:
    """Deterministic sequences; sample i is the same for ever."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(CONTEXT + 1) * (index % 7 + 1) + index) % VOCABULARY
        return {"tokens": row[:-1], "targets": row[1:]}


class Blocking(Tokens):
    """Samples that do not come while the file exists that `BLOCK_DATA` names."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        while Path(os.environ.get("BLOCK_DATA", "/nowhere/at/all")).exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def blocking_data() -> Training:
    return dataclasses.replace(tied_gpt(), dataset=Blocking)


def next_token_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def last_token_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["targets"][:, -1])


def masked_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, weight): micro-batches have unequal numbers of targets; one term uses an early value."""
    wanted = batch["targets"] % 4 != 0
    each = F.cross_entropy(output["logits"].flatten(0, 1), batch["targets"].flatten(), reduction="none")
    penalty = output["first"].square().mean() * wanted.sum()
    return (each * wanted.flatten()).sum() + 0.01 * penalty, wanted.sum()


def slow_gpt(nap_s: float = NAP_S) -> Training:
    """`tied_gpt` with steps long enough to be hit, nearly all of it asleep, until the file is there that
    `NO_NAPS` names in the job's environment. `nap_s` changes no bit."""
    return dataclasses.replace(tied_gpt(), model=lambda: TiedGPT(nap_s=nap_s), schedule=_slow_schedule)


def slowest_gpt() -> Training:
    return slow_gpt(4 * NAP_S)


def _slow_schedule(step: int) -> float:
    """The learning rate's factor, as in `tied_gpt`. It is asked for when a step is applied."""
    global _naps
    if LONG_NAPS_FROM in os.environ and step >= int(os.environ[LONG_NAPS_FROM]):
        _naps = LONGER
    return min(1.0, (step + 1) / 4)


def tied_gpt(*, dropout: float = 0.1, layers: int = 4, clip: float | None = 1.0) -> Training:
    return Training(
        model=lambda: TiedGPT(layers=layers, dropout=dropout),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        dataset=Tokens,
        schedule=lambda step: min(1.0, (step + 1) / 4),
        clip_grad_norm=clip,
    )


def untied_mlp() -> Training:
    return Training(
        model=UntiedMLP,
        loss=last_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        dataset=Tokens,
        clip_grad_norm=0.5,
    )


def broken_loss() -> Training:
    """Can be traced; its last section raises."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        raise RuntimeError("no loss today")

    return dataclasses.replace(untied_mlp(), loss=loss)


def skip_model() -> Training:
    return Training(
        model=SkipModel,
        loss=masked_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=3e-3),
        dataset=lambda: Tokens(23),
    )


class NormedMLP(nn.Module):
    """Batch norms, one of them used twice, one whose statistics are no part of the state dict, and
    dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(4))
        self.out = nn.Linear(24, VOCABULARY)
        quiet = self.norms[2]
        for name, buffer in list(quiet.named_buffers()):
            quiet.register_buffer(name, buffer, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for layer, norm in zip(self.layers, [*self.norms, self.norms[3]], strict=True):
            x = x + F.dropout(torch.relu(norm(layer(x.transpose(1, 2)).transpose(1, 2))), 0.1, self.training)
        return self.out(x.transpose(1, 2))


def summed_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, weight): large enough that fp16 overflows until its loss scale has come down."""
    targets = batch["targets"].flatten()
    total = F.cross_entropy(output.flatten(0, 1), targets, reduction="sum")
    return total, torch.tensor(float(len(targets)))


def normed_mlp() -> Training:
    return Training(
        model=NormedMLP,
        loss=summed_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        dataset=Tokens,
        clip_grad_norm=1.0,
    )


def exploding() -> Training:
    """A loss that overflows in some micro-batches."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        late = (batch["tokens"][:, 0] > 2).any()
        return next_token_loss(output, batch) * torch.where(late, 1e38, 1.0) * torch.where(late, 1e38, 1.0)

    return dataclasses.replace(normed_mlp(), loss=loss)


class Intermittent(nn.Module):
    """A layer that takes part in every other step, as a buffer counts: its gradient is zero in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.sometimes = nn.Linear(16, 16)
        self.out = nn.Linear(16, VOCABULARY)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps.add_(1)
        x = self.embed(tokens)
        for layer in self.layers[:2]:
            x = x + torch.tanh(layer(x))
        x = x + (self.steps % 2) * self.sometimes(x)
        for layer in self.layers[2:]:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def intermittent() -> Training:
    return dataclasses.replace(untied_mlp(), model=Intermittent, loss=next_token_loss)
