"""What an `nn.Module` holds, set without its checks, and the hooks that were registered on it.

The public ways to set a parameter check it, look at memory or move a module's other tensors, none of which
works with fake tensors; there is none to ask for hooks. Checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import _C, Tensor, nn
from torch.nn.modules import module as _module_state
from torch.nn.modules.batchnorm import (
    _BatchNorm,  # pyright: ignore[reportPrivateUsage]
    _NormBase,  # pyright: ignore[reportPrivateUsage]
)

APPLY = "_apply"
"""The method of `nn.Module` through which all conversions (`to`, `half`, `cuda`) go."""
BatchNorm = _BatchNorm
NormWithStatistics = _NormBase
"""The base of batch norm and instance norm."""
OWN_FIELDS = frozenset(vars(nn.Module()))
"""The attributes that every module has: its registries, and `training`."""
_parse_to: Any = _C._nn._parse_to  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The registry (name -> parameter or None) of the module's own parameters, to be changed in place."""
    return vars(module)["_parameters"]


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The registry (name -> tensor or None) of the module's own buffers, to be changed in place."""
    return vars(module)["_buffers"]


def convert(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace the parameters and buffers of `module` and of those in it by what `function` gives for them."""
    module._apply(function)  # pyright: ignore[reportPrivateUsage]


def requested_conversion(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The type and memory format that arguments of `Module.to` ask for, as its keyword arguments."""
    _, dtype, _, memory_format = _parse_to(*args, **kwargs)
    asked = {"dtype": dtype, "memory_format": memory_format}
    return {name: value for name, value in asked.items() if value is not None}


def backward_hooks(module: nn.Module) -> list[Any]:
    """Hooks on the gradients of the module's inputs and outputs."""
    return _held(module, "_backward_hooks", "_backward_pre_hooks")


def global_backward_hooks() -> list[Any]:
    """Those that were registered for all modules."""
    return _held(_module_state, "_global_backward_hooks", "_global_backward_pre_hooks")


def gradient_hooks(tensor: Tensor) -> list[Any]:
    """Hooks on the gradient of `tensor`."""
    return _held(tensor, "_backward_hooks", "_post_accumulate_grad_hooks")


def _held(owner: Any, *fields: str) -> list[Any]:
    return [hook for name in fields for hook in (getattr(owner, name, None) or {}).values()]
