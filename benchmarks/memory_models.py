"""A transformer of any size; two for the memory benchmark: one keeps many activations, one much state; and
one that keeps a GPU busy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

VOCABULARY = 512
CONTEXT = 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.project(mixed.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))), 0.1, self.training)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.arange(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Texts:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (CONTEXT + 1,))
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


def transformer(layers: int, width: int, heads: int = 4) -> Training:
    """What a user would hand over to train it."""
    return Training(
        model=lambda: GPT(layers, width, heads),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        dataset=Texts,
        clip_grad_norm=1.0,
    )


def activations() -> Training:
    """Eight narrow layers: with micro-batches of 128, far more activations than weights."""
    return transformer(8, 96)


def state() -> Training:
    """Four wide layers: far more weights and optimizer state than activations."""
    return transformer(4, 1024)


def large() -> Training:
    """Six layers of 1536: 171 million parameters."""
    return transformer(6, 1536, 24)
