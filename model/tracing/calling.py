"""Decides how the user's model is called: entries of a collated sample go to the arguments of the same names,
together with `Training.forward_kwargs`.

Training needs no caches of keys and values (transformers): `use_cache=False` is passed if forward takes it
and neither the batch nor `forward_kwargs` gives it (where it does not, see `libraries`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import UserCodeError
from ..libraries import parameters_of_forward

_ARGUMENT_LISTS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The arguments of a model's forward, all by name."""

    inputs: tuple[str, ...]
    """Entries of the batch that forward takes, in the order of its parameters."""
    constants: Mapping[str, Any]

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**{name: batch[name] for name in self.inputs}, **self.constants}


def forward_call(model: nn.Module, batch: Mapping[str, Tensor], constants: Mapping[str, Any]) -> ForwardCall:
    """How to call `model` with `batch` and `constants` (`Training.forward_kwargs`).

    Raises `UserCodeError` if an argument without a default is given by neither or by both, no entry fits, or
    forward does not take a constant.
    """
    parameters = parameters_of_forward(model)
    _check_constants(parameters, batch, constants)
    names = tuple(name for name in parameters if name in batch)
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in batch
        and name not in constants
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in _ARGUMENT_LISTS
    ]
    if not names and all(parameter.kind in _ARGUMENT_LISTS for parameter in parameters.values()):
        raise UserCodeError(
            f"Training.model: forward of {type(model).__name__} names no argument, so it is not known which "
            f"of the samples' entries {sorted(batch)} it takes. Name them: def forward(self, "
            f"{next(iter(batch))}, ...)"
        )
    if missing or not names:
        raise UserCodeError(
            f"Training.dataset: samples have the entries {sorted(batch)}, but the model's forward needs "
            f"{missing or list(parameters)}; an entry goes to the argument of the same name"
        )
    without_cache = {"use_cache": False} if "use_cache" in parameters and "use_cache" not in batch else {}
    return ForwardCall(names, {**without_cache, **constants})


def _check_constants(
    parameters: Mapping[str, inspect.Parameter], batch: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> None:
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in constants:
        if name in batch and name in parameters:
            raise UserCodeError(
                f"Training.forward_kwargs: {name!r} is an entry of the samples as well; leave out one of them"
            )
        if name not in parameters and not open_ended:
            raise UserCodeError(
                f"Training.forward_kwargs: the model's forward has no argument {name!r}; it takes "
                f"{list(parameters)}"
            )
