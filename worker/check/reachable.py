"""The values that an optimizer and its hooks can reach and may change in training, each under its path.

A path reads like `register_step_post_hook: <lambda> closure 'scheduler'.last_epoch`. Left out are weights,
their state, and the optimizer's own settings, which are saved.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...model.torch_private.optimizer_hooks import OWN_FIELDS, step_hooks
from ...model.tracebacks import is_users
from ..sections.optimizers import SAVED
from .global_state import fingerprint

_MOST_OBJECTS = 10_000
_MOST_ELEMENTS = 1000  # of one container
_MOST_NUMBERS = 100_000  # in a tensor or array
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic, type(None))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Value(NamedTuple):
    """A value that may change: `print` compares equal as long as it says the same."""

    print: object
    holder: int  # id of the object that holds it
    hook: tuple[str, int] | None  # that reaches it: how it was registered, and its number; else None
    is_large: bool  # a tensor or array of more than one number


def reachable(optimizer: Optimizer) -> dict[str, Value]:
    """Everything that can be reached from the optimizer's attributes, its class and its hooks."""
    walk = _Walk(optimizer)
    for name, value in vars(optimizer).items():
        if name not in OWN_FIELDS and not isinstance(value, SAVED):
            walk.visit(f"self.{name}", value, vars(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and not isinstance(value, SAVED):
                walk.visit(f"param_groups[{number}][{key!r}]", value, group)
    for kind in type(optimizer).__mro__:
        if _may_change(kind):
            walk.visit(kind.__name__, kind, kind)
    for registered, hooks in step_hooks(optimizer).items():
        for number, hook in enumerate(hooks.values()):
            walk.hook = registered, number
            walk.visit(f"{registered}: {getattr(hook, '__name__', type(hook).__name__)}", hook, hooks)
    return walk.found


def _may_change(kind: type) -> bool:
    """Whether it is a class of the user, or of a library other than torch."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users(Path(file))


class _Walk:
    def __init__(self, optimizer: Optimizer) -> None:
        self.found: dict[str, Value] = {}
        self.hook: tuple[str, int] | None = None
        self._seen = {id(optimizer), id(optimizer.param_groups), id(optimizer.state)}
        self._seen |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._seen |= {id(group) for group in optimizer.param_groups}
        self._kept: list[object] = []  # objects that were made on the way, so that no id is used twice

    def visit(self, path: str, value: Any, holder: object) -> None:
        """Without recursion: the objects of a user may nest deeply."""
        waiting: deque[tuple[str, Any, object]] = deque([(path, value, holder)])
        while waiting and len(self._seen) < _MOST_OBJECTS:
            path, value, holder = waiting.popleft()
            if isinstance(value, _NUMBERS):
                self._add(path, fingerprint(value), holder)
            elif isinstance(value, weakref.ref):
                waiting.append((path, cast(object, value()), holder))
            elif id(value) not in self._seen:
                self._seen.add(id(value))
                self._kept.append(value)
                waiting += self._parts(path, value, holder)

    def _add(self, path: str, print_: object, holder: object, *, is_large: bool = False) -> None:
        self._kept.append(holder)
        self.found.setdefault(path, Value(print_, id(holder), self.hook, is_large))

    def _parts(self, path: str, value: Any, holder: object) -> Iterator[tuple[str, Any, object]]:
        if isinstance(value, Tensor | np.ndarray):
            array = torch.from_numpy(value) if _is_numeric(value) else value
            if isinstance(array, Tensor) and array.numel() <= _MOST_NUMBERS:
                # The same tensor may be written in place: it holds itself.
                self._add(path, fingerprint(array), value, is_large=array.numel() > 1)
        elif isinstance(value, _GENERATORS):
            self._add(path, fingerprint(value), value)
        elif isinstance(value, _CONTAINERS):
            self._add(f"len({path})", len(cast(list[object], value)), cast(object, value))
            yield from _elements(path, value)
        elif isinstance(value, FunctionType):
            yield from _of_function(path, value)
        elif isinstance(value, MethodType):
            yield path, value.__func__, holder
            yield f"{path} self", value.__self__, holder
        elif isinstance(value, partial):
            parts = cast("partial[object]", value)
            yield from ((path, part, holder) for part in (parts.func, parts.args, parts.keywords))
        elif isinstance(value, GeneratorType):
            self._add(f"{path} (a generator)", getattr(value.gi_frame, "f_lasti", -1), value)
            if value.gi_frame is not None:
                yield from ((f"{path}.{k}", part, value) for k, part in value.gi_frame.f_locals.items())
        elif isinstance(value, type):
            if _may_change(value):
                yield from _of_class(path, value)
        elif not isinstance(value, ModuleType):
            yield from self._of_object(path, value)

    def _of_object(self, path: str, value: Any) -> Iterator[tuple[str, Any, object]]:
        kind: type = type(value)
        if kind is itertools.count:
            self._add(path, repr(value), value)
        elif isinstance(value, Iterator) and (hint := operator.length_hint(value, -1)) >= 0:
            self._add(f"{path} (an iterator)", hint, cast(object, value))
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return  # loggers, locks, files: state of the process, and graphs without an end
        attributes: object = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for name, part in list(cast(dict[str, object], attributes).items()):
                yield f"{path}.{name}", part, cast(object, value)
        for base in kind.__mro__:
            slots: Any = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if isinstance(name, str) and name != "__dict__" and hasattr(value, name):
                    yield f"{path}.{name}", getattr(value, name), cast(object, value)
        calls = [vars(base).get("__call__") for base in kind.__mro__ if _may_change(base)]
        yield from ((path, call, kind) for call in calls if call is not None)


def _is_numeric(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "bif" and value.dtype.isnative


def _elements(path: str, value: Any) -> Iterator[tuple[str, Any, object]]:
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = list(islice(value.items(), _MOST_ELEMENTS))
    elif isinstance(value, set | frozenset):
        items = enumerate(sorted(map(repr, islice(cast("set[object]", value), _MOST_ELEMENTS))))
    else:
        items = enumerate(list(islice(value, _MOST_ELEMENTS)))
    for number, (key, part) in enumerate(items):
        name = repr(key) if isinstance(key, str | int) else number
        yield f"{path}[{name}]", part, value


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path} closure {name!r}", cell.cell_contents, cell
        except ValueError:
            continue  # a variable that has no value yet
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"{path} default {number}", value, function
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"{path} default {name!r}", value, function
    for name, value in vars(function).items():
        yield f"{path}.{name}", value, function
    if not is_users(Path(function.__code__.co_filename)):
        return
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield f"{path} global {name!r}", function.__globals__[name], function.__globals__


def _names(code: CodeType) -> set[str]:
    """The global names in a function and in those that it defines."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names}.union(*inner)


def _of_class(path: str, kind: type) -> Iterator[tuple[str, Any, object]]:
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") or name == "__call__":
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            yield (path if isinstance(inner, FunctionType) else f"{path}.{name}"), inner, kind
