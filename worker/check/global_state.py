"""State that Python objects keep from one call to the next, found by looking before and after.

Tells a fake tensor from a real one: checked with torch 2.13.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...model.torch_private.fake_tensors import FakeTensor
from ...model.torch_private.modules import OWN_FIELDS

_DEPTH = 3
_MANY = 1000
_CACHES = type(functools.lru_cache(len))


class Watch:
    """Looks at a module's plain attributes, and at globals of the user's files and closures of the user's
    functions."""

    def __init__(self, folder: Path, functions: Mapping[str, Callable[..., Any] | None]) -> None:
        """`folder`: of the user's files. `functions`: by the name under which a message shows them."""
        self._folder = str(folder)
        self._functions = {name: value for name, value in functions.items() if value is not None}
        self.changed: dict[str, None] = {}
        """Names of what changed while watched, in the order in which it was found."""

    @contextmanager
    def over(self, module: nn.Module | None = None) -> Generator[None]:
        """Notes in `changed` what is another afterwards."""
        before = self._look(module)
        yield
        after = self._look(module)
        self.changed |= dict.fromkeys(
            name for name, now in after.items() if name not in before or before[name] != now
        )

    def leaked(self) -> list[str]:
        """The holders of fake tensors after tracing: of values that forward stored outside the model."""
        named = self._named(None)
        return [
            name
            for name, value in named
            if any(isinstance(x, FakeTensor) for held in (value, *_cached(value)) for x in _parts(held))
        ]

    def _look(self, module: nn.Module | None) -> dict[str, object]:
        found: dict[str, object] = {
            name: [fingerprint(part) for part in _parts(value)] for name, value in self._named(module)
        }
        found["the state of Python's random"] = hash(random.getstate())
        found["the state of numpy.random"] = str(np.random.get_state())
        return found

    def _named(self, module: nn.Module | None) -> Iterator[tuple[str, object]]:
        for path, part in module.named_modules() if module is not None else ():
            for name, value in vars(part).items():
                if name not in OWN_FIELDS and not name.endswith("_hooks"):
                    yield f"the model's attribute {f'{path}.{name}' if path else name!r}", value
        for file in self._own_modules():
            for name, value in vars(file).items():
                if not name.startswith("__"):
                    yield f"the global {file.__name__}.{name}", value
                if isinstance(value, type) and value.__module__ == file.__name__:
                    for own, inner in vars(value).items():
                        if not own.startswith("__") and (isinstance(inner, _CACHES) or not callable(inner)):
                            yield f"the class attribute {file.__name__}.{name}.{own}", inner
        for name, function in self._functions.items():
            for free, value in _closure(function).items():
                yield f"the variable {free!r} of {name}", value

    def _own_modules(self) -> list[ModuleType]:
        return [
            value
            for value in list(sys.modules.values())
            if (file := getattr(value, "__file__", None) or "").startswith(self._folder)
            and "site-packages" not in file
        ]


def _closure(function: Callable[..., Any]) -> dict[str, object]:
    inner: Any = getattr(function, "__wrapped__", function)
    if not isinstance(inner, FunctionType) or inner.__closure__ is None:
        own: object = getattr(inner, "__self__", None)
        return {} if own is None or isinstance(own, ModuleType) else {"self": own}
    cells = zip(inner.__code__.co_freevars, inner.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # not the empty ones


def _cached(value: object) -> list[object]:
    """The results that a function under `functools.lru_cache` keeps; they have no other name."""
    return gc.get_referents(value) if isinstance(value, _CACHES) else []


def _parts(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """The elements and attributes of `value`, to some depth, and how many there are."""
    attributes: object = getattr(value, "__dict__", None)
    if isinstance(value, Tensor | type | ModuleType | FunctionType | nn.Module) or depth == 0:
        yield value
    elif getattr(value, "__origin__", None) is not None:
        yield None  # an annotation
    elif isinstance(value, dict | list | tuple | set | frozenset):
        yield len(cast(list[object], value))
        items = cast(dict[object, object], value).items() if isinstance(value, dict) else enumerate(value)
        for key, element in islice(cast(Iterator[tuple[object, object]], items), _MANY):
            yield repr(key)[:99]
            yield from _parts(element, depth - 1)
    else:
        yield value
        if isinstance(attributes, dict) and not isinstance(value, random.Random):
            yield from _parts(cast(object, attributes), depth - 1)


def fingerprint(part: object) -> object:
    """A value that compares equal as long as `part` says the same."""
    if part is None or isinstance(part, bool | int | float | complex | str | bytes | np.generic):
        return repr(part)
    if isinstance(part, torch.Generator):
        return fingerprint(part.get_state())
    if isinstance(part, np.random.Generator):
        return str(part.bit_generator.state)
    if isinstance(part, np.random.RandomState):
        return str(part.get_state())
    if isinstance(part, random.Random):
        return hash(part.getstate())
    if not isinstance(part, Tensor):
        return id(part)
    form = (tuple(part.shape), str(part.dtype))
    if part.is_meta or part.numel() == 0 or type(part) not in (Tensor, nn.Parameter):
        return form
    wide = part.detach().double()
    return *form, float(wide.sum()), float(wide.square().sum())
