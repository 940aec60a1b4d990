"""A model whose operations take calibrated time asleep, so that two cores do for the ranks of a pipeline.

Each block sleeps in its forward, as long again for the gradient of its input and for those of its parameters,
around a small real matrix product. The same modules serve Makara, which traces and cuts them, and
`torch.distributed.pipelining`, which is given them as stages.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn


@torch.library.custom_op("makara_benchmarks::nap", mutates_args=())
def nap(x: Tensor, forward_s: float) -> Tensor:
    """A copy of `x` after `forward_s` seconds asleep; its gradient takes as long."""
    if forward_s:
        time.sleep(forward_s)
    return x.clone()


@nap.register_fake
def _(x: Tensor, forward_s: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx, inputs, output) -> None:
    ctx.forward_s = inputs[1]
    # As tanh does: else `torch.utils.checkpoint`, which stops once it has what was saved, would skip it.
    ctx.save_for_backward(output)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    assert ctx.saved_tensors, "recomputed or kept"
    return nap(gradient.contiguous(), ctx.forward_s), None


nap.register_autograd(_backward, setup_context=_remember)


@torch.library.custom_op("makara_benchmarks::weighed", mutates_args=())
def weighed(weight: Tensor, gradient_s: float) -> Tensor:
    """A copy of `weight`, whose gradient takes `gradient_s` seconds asleep."""
    return weight.clone()


@weighed.register_fake
def _(weight: Tensor, gradient_s: float) -> Tensor:
    return torch.empty_like(weight)


def _remember_time(ctx, inputs, output) -> None:
    ctx.gradient_s = inputs[1]


def _weight_backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    return nap(gradient.contiguous(), ctx.gradient_s), None


weighed.register_autograd(_weight_backward, setup_context=_remember_time)


class Block(nn.Module):
    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        weight = weighed(self.linear.weight, self.forward_s)
        return nap(torch.tanh(F.linear(x, weight, self.linear.bias)), self.forward_s)


class Chain(nn.Module):
    """`num_blocks` blocks in a row; x and the result are (m, width)."""

    def __init__(self, num_blocks: int, width: int, forward_s: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, forward_s) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Points:
    """Random inputs and targets."""

    def __init__(self, size: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(size, width, generator=generator)
        self._y = torch.randn(size, width, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "y": self._y[index]}


def training(num_blocks: int, width: int, forward_s: float, samples: int) -> Training:
    """What a user would hand over to train the chain."""
    return Training(
        model=lambda: Chain(num_blocks, width, forward_s),
        loss=lambda output, batch: F.mse_loss(output, batch["y"]),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        dataset=lambda: Points(samples, width),
    )
