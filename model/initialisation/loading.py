"""Weights that a model's construction reads from files: `torch.load`, pickle, safetensors, libraries.

Where the format allows, the file is mapped into memory and not read: the model gets fake tensors, and a
section's worker later reads only the pages of its own parameters.

Checked with safetensors 0.8 and transformers 5.23.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..patching import replaced
from ..torch_private.dispatch import no_modes
from ..torch_private.modules import own_buffers, own_parameters
from ..torch_private.storages import REBUILD

_READS_IN_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers

Adopt = Callable[[Tensor], Tensor]
"""Makes the fake tensor that stands for a real one; returns a fake one unchanged."""
_Made = dict[int, tuple[Tensor, Tensor]]
"""{id of a real tensor: (the tensor, kept alive for its id, its fake one)}."""


@contextmanager
def loading(adopt: Adopt) -> Generator[None]:
    """While a model is built with fake tensors, replace tensors that are read from files by fake ones."""
    load, rebuild = torch.load, getattr(*REBUILD)

    def load_real(
        f: Any, map_location: Any = None, *args: Any, mmap: bool | None = None, **kwargs: Any
    ) -> Any:
        mapped = isinstance(f, str | os.PathLike) and zipfile.is_zipfile(cast(str, f))
        with no_modes(), replaced(*REBUILD, rebuild):
            loaded = load(f, "cpu", *args, mmap=mapped, **kwargs)
        return _adopted(loaded, adopt, {})

    def unpickled(*args: Any) -> Tensor:
        with no_modes():
            real = rebuild(*args)
        return adopt(real)

    with ExitStack() as stack:
        stack.enter_context(_replaced_everywhere(load, load_real))
        stack.enter_context(replaced(*REBUILD, unpickled))
        stack.enter_context(_in_this_thread())
        stack.enter_context(_Storages(adopt))
        yield


@contextmanager
def _replaced_everywhere(original: object, value: object) -> Generator[None]:
    """Replace a function everywhere, also where a module imported it by name (`from torch import load`)."""
    _put(original, value)
    try:
        yield
    finally:
        _put(value, original)


def _put(old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        names = cast(dict[str, object], getattr(module, "__dict__", {}))
        for name in [name for name, held in list(names.items()) if held is old]:
            names[name] = new


@contextmanager
def _in_this_thread() -> Generator[None]:
    """Have transformers read weights in this thread; in its own threads it would read all into memory."""
    before = os.environ.get(_READS_IN_THREADS)
    os.environ[_READS_IN_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_READS_IN_THREADS]
        else:
            os.environ[_READS_IN_THREADS] = before


class _Storages(TorchFunctionMode):
    """Intercepts tensors that safetensors makes from a mapped storage, which cannot be made fake."""

    def __init__(self, adopt: Adopt) -> None:
        super().__init__()
        self._adopt = adopt

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.asarray and args and isinstance(args[0], torch.UntypedStorage):
            with no_modes():
                real = func(*args, **(kwargs or {}))
            return self._adopt(real)
        return func(*args, **(kwargs or {}))


def _adopted(value: Any, adopt: Adopt, made: _Made) -> Any:
    """`value` with its tensors replaced by fake ones, in containers and modules in place."""
    if isinstance(value, Tensor):
        return _standing_for(value, adopt, made)
    if isinstance(value, nn.Module):
        adopt_module(value, adopt)
    elif isinstance(value, dict):
        entries = cast(dict[Any, Any], value)
        for key, entry in entries.items():
            entries[key] = _adopted(entry, adopt, made)
    elif isinstance(value, list):
        items = cast(list[Any], value)
        items[:] = [_adopted(item, adopt, made) for item in items]
    elif isinstance(value, tuple):
        parts = [_adopted(part, adopt, made) for part in cast(tuple[Any, ...], value)]
        kind = cast(Any, type(cast(object, value)))
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return value


def adopt_module(module: nn.Module, adopt: Adopt) -> None:
    """Replace a module's real parameters and buffers by fake ones; shared ones stay shared."""
    made: _Made = {}
    for part in module.modules():
        for held in (own_parameters(part), own_buffers(part)):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = _standing_for(tensor, adopt, made)


def _standing_for(real: Tensor, adopt: Adopt, made: _Made) -> Tensor:
    if id(real) not in made:
        fake = adopt(real)  # the same object if it is fake, so that its hooks are found later
        if fake is not real and isinstance(real, nn.Parameter):
            fake = nn.Parameter(fake, real.requires_grad)
        made[id(real)] = real, fake
    return made[id(real)][1]
