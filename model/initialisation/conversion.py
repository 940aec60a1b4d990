"""Makes `model.to(...)`, `.half()`, `.cuda()` and `copy.deepcopy` work while a model has fake tensors.

Types are converted, and the conversion is recorded like any operation. Devices are ignored: Makara places
sections. torch itself cannot swap fake parameters, nor copy fake buffers (checked with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..patching import replaced
from ..torch_private.fake_tensors import FakeTensor
from ..torch_private.modules import APPLY, convert, own_buffers, own_parameters, requested_conversion


@contextmanager
def converting() -> Generator[None]:
    """In this context, conversions of modules work on fake parameters; shared ones stay shared."""
    made: dict[tuple[int, int], tuple[Any, ...]] = {}
    original_to: Callable[..., nn.Module] = nn.Module.to

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            convert(child, fn)
        parameters, buffers = own_parameters(self), own_buffers(self)
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            key = (id(parameter), id(fn))
            if key not in made:
                with torch.no_grad():
                    applied = fn(parameter)
                new = parameter if applied is parameter else nn.Parameter(applied, parameter.requires_grad)
                made[key] = (new, parameter, fn)  # keep the objects alive, so that their ids stay unique
            parameters[name] = made[key][0]
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = fn(buffer)
        return self

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        wanted = requested_conversion(*args, **kwargs)
        return original_to(self, **wanted) if wanted else self

    def stay(self: nn.Module, device: object = None) -> nn.Module:
        return self

    with (
        replaced(nn.Module, APPLY, apply),
        replaced(nn.Module, "to", to),
        replaced(nn.Module, "cuda", stay),
        replaced(nn.Module, "cpu", stay),
        replaced(FakeTensor, "__deepcopy__", _copied),
    ):
        yield


def _copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of a fake tensor; torch's own reads memory."""
    if id(self) not in memo:
        with torch.no_grad():
            copy = self.detach().clone(memory_format=torch.preserve_format)
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy.requires_grad_(self.requires_grad)
    return memo[id(self)]
