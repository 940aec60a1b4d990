"""The user's optimizer over small stand-ins for the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.seeds import seed64
from ...model.training import Training, call_user_code
from ..sections.optimizers import OwnSettings, make_optimizer
from .random_numbers import FixedNumbers

Gradient = Callable[[str, Tensor], Tensor]
"""(parameter's name, its value) -> a gradient."""

WEIGHT = 0.05  # standard deviation of the stand-ins
_LARGEST = 4  # elements along a dimension


class SmallOptimizers:
    """One optimizer for each group of names. The parameters have the model's names, types and numbers of
    dimensions, and a few elements."""

    def __init__(
        self, training: Training, tensors: Mapping[str, Tensor], groups: Sequence[Sequence[str]]
    ) -> None:
        """`tensors`: the model's, by name. Raises `UserCodeError` when the optimizer cannot be made."""
        self._parameters = [{name: _small(name, tensors[name]) for name in group} for group in groups]
        made = [make_optimizer(training, list(parameters.items())) for parameters in self._parameters]
        self._optimizers = [optimizer for optimizer in made if optimizer is not None]
        self._settings = [OwnSettings(optimizer, 0, scheduled=False) for optimizer in self._optimizers]
        self._options = {
            name: _numbers(group)
            for parameters, optimizer in zip(self._parameters, self._optimizers, strict=True)
            for name, parameter in parameters.items()
            for group in optimizer.param_groups
            if any(held is parameter for held in group["params"])
        }

    def step(self, gradient: Gradient) -> dict[str, Tensor]:
        """Each parameter's change. Raises `UserCodeError` when the optimizer raises."""
        changes: dict[str, Tensor] = {}
        for parameters, optimizer in zip(self._parameters, self._optimizers, strict=True):
            before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                parameter.grad = gradient(name, parameter).to(parameter.dtype)
            with FixedNumbers():
                call_user_code("optimizer.step()", cast(Callable[[], object], optimizer.step))
            changes |= {name: parameters[name].detach() - old for name, old in before.items()}
        return changes

    def options(self, name: str) -> dict[str, object]:
        """Numbers and flags of the parameter group that holds the parameter, before any step."""
        return self._options.get(name, {})

    def check_state(self) -> None:
        """Raises `UserCodeError` when an optimizer keeps what cannot be saved."""
        for settings in self._settings:
            settings.state()


def _numbers(named: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in named.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            found[name] = float(value)
    return found


def _small(name: str, tensor: Tensor) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed64("probe weight", name) >> 1)
    shape = [min(size, _LARGEST) for size in tensor.shape]
    return nn.Parameter((torch.randn(shape, generator=generator) * WEIGHT).to(tensor.dtype))
