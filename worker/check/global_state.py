"""State that Python objects keep from one call to the next, found by looking before and after."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_DEPTH = 3
_MANY = 1000
_OF_MODULE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
Print = Mapping[str, object]


class Watch:
    """Looks at a module's plain attributes, and at globals of the user's files and closures of the user's
    functions."""

    def __init__(self, folder: Path, functions: Mapping[str, Callable[..., Any] | None]) -> None:
        """`folder`: of the user's files. `functions`: by the name under which a message shows them."""
        self._folder = folder
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

    def _look(self, module: nn.Module | None) -> dict[str, object]:
        found = {name: _print(value, _DEPTH) for name, value in self._named(module)}
        found["the state of Python's random"] = hash(random.getstate())
        found["the state of numpy.random"] = str(np.random.get_state())
        return found

    def leaked(self) -> list[str]:
        """What holds a fake tensor after tracing: a value that forward stored outside the model."""
        return [name for name, value in self._named(None) if _holds_fake(value, _DEPTH)]

    def _named(self, module: nn.Module | None) -> Iterator[tuple[str, object]]:
        for path, part in module.named_modules() if module is not None else ():
            for name, value in vars(part).items():
                if name not in _OF_MODULE and not name.endswith("_hooks"):
                    yield f"the model's attribute {f'{path}.{name}' if path else name!r}", value
        for file in self._own_modules():
            for name, value in vars(file).items():
                if not name.startswith("__"):
                    yield f"the global {file.__name__}.{name}", value
                if isinstance(value, type) and value.__module__ == file.__name__:
                    for own, inner in vars(value).items():
                        if not own.startswith("__") and not callable(inner):
                            yield f"the class attribute {file.__name__}.{name}.{own}", inner
        for name, function in self._functions.items():
            for free, value in _closure(function).items():
                yield f"the variable {free!r} of {name}", value

    def _own_modules(self) -> list[ModuleType]:
        folder = str(self._folder)
        return [
            value
            for value in list(sys.modules.values())
            if (file := getattr(value, "__file__", None) or "").startswith(folder)
            and "site-packages" not in file
        ]


def _closure(function: Callable[..., Any]) -> dict[str, object]:
    inner: Any = getattr(function, "__wrapped__", function)
    if not isinstance(inner, FunctionType) or inner.__closure__ is None:
        own: object = getattr(inner, "__self__", None)
        return {} if own is None or isinstance(own, ModuleType) else {"self": own}
    cells = zip(inner.__code__.co_freevars, inner.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _holds_fake(value: object, depth: int) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    if depth == 0 or isinstance(value, type | ModuleType | FunctionType | nn.Module):
        return False
    inside: object = value if isinstance(value, dict | list | tuple | set) else getattr(value, "__dict__", ())
    elements = inside.values() if isinstance(inside, dict) else inside
    return any(_holds_fake(element, depth - 1) for element in cast(list[object], elements))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that was never assigned
        return False
    return True


def _print(value: object, depth: int) -> object:
    """Something that compares equal as long as `value` says the same."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, Tensor):
        return _print_tensor(value)
    if isinstance(value, torch.Generator):
        return _print_tensor(value.get_state())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, type | ModuleType | FunctionType | nn.Module) or depth == 0:
        return id(value)
    if getattr(value, "__origin__", None) is not None:
        return None  # an annotation
    if isinstance(value, dict):
        items = list(cast(dict[object, object], value).items())
        return len(items), [(repr(k)[:99], _print(v, depth - 1)) for k, v in items[:_MANY]]
    if isinstance(value, list | tuple | set | frozenset):
        elements = list(cast(list[object], value))
        return len(elements), [_print(element, depth - 1) for element in elements[:_MANY]]
    inside: dict[str, object] | None = getattr(value, "__dict__", None)
    return id(value) if inside is None else (id(value), _print(inside, depth - 1))


def _print_tensor(value: Tensor) -> object:
    form = (tuple(value.shape), str(value.dtype))
    if value.is_meta or value.numel() == 0 or type(value) not in (Tensor, nn.Parameter):
        return form
    with torch.no_grad():
        wide = value.detach().double()
        return *form, float(wide.sum()), float(wide.square().sum())
