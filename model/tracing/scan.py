"""Finds parts of a built model that a trace would drop or cannot hold, before its forward runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableModel
from ..precision import dtype_name
from ..torch_private.modules import (
    NormWithStatistics,
    backward_hooks,
    global_backward_hooks,
    gradient_hooks,
)
from ..torch_private.storages import storage_key
from .source import defined_at

_LOST = (
    "it works on gradients, which are not part of the graph, and would be lost. Do the same in the forward "
    "pass or in the optimizer"
)


def refuse_unheld(model: nn.Module) -> None:
    """Raise `UntraceableModel` naming the module, the parameter or the hook, and what to change.

    Refused are backward hooks of modules and parameters, wrappers that replicate, cumulative averages, sparse
    gradients, parameters of types that are not trained, and tensors that share memory.
    """
    for name, module in model.named_modules():
        _check_module(f"{name!r} ({type(module).__name__})" if name else type(module).__name__, module)
    _check_hooks("all modules", "a backward hook", global_backward_hooks())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _check_hooks(repr(name), "a hook on its gradient", gradient_hooks(tensor))
    for name, parameter in model.named_parameters():
        _check_type(name, parameter)
    _check_memory(model)


def _check_type(name: str, parameter: nn.Parameter) -> None:
    """Refuse complex and float64: gradients are summed in fp32, and states are stored as real numbers."""
    if parameter.is_complex():
        raise UntraceableModel(
            f"the parameter {name!r} is {dtype_name(parameter.dtype)}; parameters are real numbers here. "
            "Make it one with a last dimension of 2 (torch.view_as_real(...)), and use torch.view_as_complex "
            "of it in forward"
        )
    if parameter.dtype == torch.float64:
        raise UntraceableModel(
            f"the parameter {name!r} is float64; gradients are summed in float32, so the result would not be "
            "one of float64. Leave out .double() (or torch.set_default_dtype) and convert single values in "
            "forward where they need it"
        )


def _check_module(name: str, module: nn.Module) -> None:
    _check_hooks(f"module {name}", "a backward hook", backward_hooks(module))
    if any(_replicates(base) for base in type(module).__mro__):
        raise UntraceableModel(
            f"module {name} replicates a model. Give the model itself: Makara replicates it over workers"
        )
    if isinstance(module, NormWithStatistics) and module.momentum is None and module.track_running_stats:
        raise UntraceableModel(
            f"module {name}: momentum=None averages over all calls so far, which depends on the values of a "
            "counter. Give a momentum (0.1 is usual)"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise UntraceableModel(
            f"module {name}: sparse=True gives sparse gradients, which cannot be summed over workers. "
            "Use sparse=False"
        )


def _replicates(base: type) -> bool:
    return base.__module__.startswith(("torch.nn.parallel", "torch.distributed"))


def _check_hooks(whose: str, kind: str, hooks: Iterable[Any]) -> None:
    for hook in hooks:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise UntraceableModel(f"{whose} has {kind}, {name}: {_LOST}", defined_at(hook))


def _check_memory(model: nn.Module) -> None:
    """Refuse two tensors on one memory, which would become two; one tensor with two names stays one."""
    parameters = dict(model.named_parameters())
    owners: dict[int, str] = {}
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        other = owners.setdefault(storage_key(tensor), name)
        if other != name and (name in parameters or other in parameters):
            raise UntraceableModel(
                f"{other!r} and {name!r} are two tensors on one memory; they would be trained "
                "apart. To share, assign the same Parameter to both"
            )
