"""The user's loss with an ear on it: what it was given, what it called, whether it says the same twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import tree_map

from ...model.data import Sample
from ...model.training import Loss
from .calls import Calls


class LossListener:
    """Stands in for `Training.loss`."""

    def __init__(self, loss: Callable[[Any, dict[str, Tensor]], Loss]) -> None:
        self._loss = loss
        self.calls = Calls()
        self.heard: list[tuple[Any, Sample]] = []
        """(output without its graph, batch) of each call."""
        self.repeated: tuple[float, float] | None = None
        """The loss of the first call and of the same call again, where they differ."""
        self.weights: list[float] | None = None
        """What was declared with each call's sum; None: the loss is a mean."""

    def __call__(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        output_before = tree_map(_detached, output)
        with self.calls.watched():
            loss: Any = self._loss(output, batch)
            if not self.heard:
                once, again = loss_value(loss), loss_value(self._loss(output, batch))
                if once != again and (once == once or again == again):
                    self.repeated = once, again
        self.heard.append((output_before, batch))
        if isinstance(loss, tuple):
            self.weights = [*(self.weights or []), float(cast(tuple[Any, Any], loss)[1])]
        return cast(Loss, loss)


def loss_value(loss: Any) -> float:
    """The loss that `Training.loss` returned, as a number."""
    total, weight = cast(tuple[Any, Any], loss) if isinstance(loss, tuple) else (loss, 1.0)
    return float(total.detach()) / float(weight)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
