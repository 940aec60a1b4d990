"""Models of other people's libraries, tiny, for `python -m benchmarks models`.

In: a library's name. Out: the names of models that can be drawn, and a `Training` for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from makara.worker import Training
from torch import Tensor, nn

_MOST_PARAMETERS = 8_000_000


class Samples:
    """Sixteen samples whose entries are drawn by functions."""

    def __init__(self, entries: Mapping[str, Callable[[], Tensor]]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: draw() for name, draw in self.entries.items()}


def training_of(
    model: Callable[[], nn.Module],
    loss: Callable[[Any, dict[str, Tensor]], Any],
    **entries: Callable[[], Tensor],
) -> Training:
    """`entries`: how the parts of a sample are drawn."""
    return Training(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        dataset=lambda: Samples(entries),
    )


def own_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """That which the model computes from its labels."""
    return output.loss


def integers(stop: int, *shape: int) -> Callable[[], Tensor]:
    """Draws integers from 3 (below are special tokens) to `stop`."""
    return lambda: torch.randint(3, stop, shape)


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def declare_operators() -> None:
    """torchvision's wheels at PyPI are for torch with CUDA: with another one its operators are missing, and
    torchvision cannot be imported. No model here calls one, so that a declaration is enough."""
    if not hasattr(torch.ops.torchvision, "nms"):
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


class TooLarge(Exception):
    """The check would take too long; another model is drawn."""


def refuse_large(model: nn.Module) -> None:
    """`model` may be on the meta device."""
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > _MOST_PARAMETERS:
        raise TooLarge(f"{size} parameters")
