"""A student with binary weights and its mean teacher: what research code does besides layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

CLASSES = 10
SIZE = 12


class Sign(torch.autograd.Function):
    """The sign of a weight; the gradient passes where the weight is small."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.bound = bound
        return torch.sign(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= ctx.bound), None


class BinaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Sign.apply(self.weight, 1.0), self.bias) / self.in_features**0.5


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.binary = nn.LayerNorm(width), BinaryLinear(width, width)
        self.out = weight_norm(nn.Linear(width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.out(F.relu(self.binary(self.norm(x)))))


class Student(nn.Module):
    """Its blocks are copies of one; the teacher is a moving average of the head, in buffers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = spectral_norm(nn.Linear(SIZE, width))
        block = Block(width, dropout)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("teacher_weight", self.head.weight.detach().clone())
        self.register_buffer("teacher_bias", self.head.bias.detach().clone())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        weight, bias = self.get_buffer("teacher_weight"), self.get_buffer("teacher_bias")
        with torch.no_grad():
            weight.lerp_(self.head.weight, 0.1)
            bias.lerp_(self.head.bias, 0.1)
            taught = F.linear(x, weight, bias)
        return {"logits": self.head(x), "taught": taught}


class Points:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = index % CLASSES
        return {
            "x": torch.randn(SIZE) * 0.1 + F.one_hot(torch.tensor(label), SIZE),
            "target": torch.tensor(label),
        }


def _loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    near = F.mse_loss(output["logits"].softmax(1), output["taught"].softmax(1))
    return F.cross_entropy(output["logits"], batch["target"]) + near


def mean_teacher(dropout: float = 0.1, *, width: int = 16) -> Training:
    return Training(
        model=lambda: Student(width, dropout),
        loss=_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01),
        dataset=Points,
        clip_grad_norm=1.0,
    )
