"""Makes a custom `torch.autograd.Function` one operation of the graph, with the backward that the user wrote.

torch.export traces the function's forward and silently drops its backward. So a call becomes an operator that
runs the function's `apply` wherever the graph runs. On fake tensors it computes only shapes.

Every process traces the model and defines the same operators: the name is derived from the function's name,
its arguments that are not tensors, and, if two functions of a trace share a name, from their order of use.

Registers operators with torch.library: checked with torch 2.13.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ..torch_private.storages import storage_key, version_of

_LIBRARY = torch.library.Library("makara", "FRAGMENT")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_DEFINED: dict[str, _Call] = {}


class Unheld(ValueError):
    """Why a function cannot be one operation of a graph."""


@dataclass(slots=True)
class _Call:
    """A function with its arguments; tensors are passed in at each call."""

    function: type[Function]
    apply: Callable[..., Any]
    arguments: tuple[Any, ...]  # None where a tensor goes
    places: tuple[int, ...]  # of tensors
    single: bool = True  # the function returns a tensor, not a tuple of them

    def with_backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run(self.apply, self._filled(tensors), tensors)

    def forward_alone(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        forward: Callable[..., Any] = self.function.forward
        arguments = self._filled(tensors)
        apart = self.function.setup_context != Function.setup_context
        return self._run(forward, arguments if apart else [_Context(), *arguments], tensors)

    def _filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        arguments = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        return arguments

    def _run(
        self, function: Callable[..., Any], arguments: Sequence[Any], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        versions = [version_of(tensor) for tensor in tensors]
        returned = function(*arguments)
        if versions != [version_of(tensor) for tensor in tensors]:
            raise Unheld("it changes an argument in place")
        self.single = isinstance(returned, Tensor)
        results = [returned] if self.single else list(cast(Sequence[Any], returned))
        if not results or not all(isinstance(result, Tensor) for result in results):
            raise Unheld("it returns something else than tensors")
        # An operator's results must have memory of their own.
        given = {storage_key(tensor) for tensor in tensors}
        return [result.clone() if storage_key(result) in given else result for result in results]


class _Context(FunctionCtx):
    """The context of a forward that has no backward."""

    needs_input_grad = (True,) * 64


class Operators:
    """The operators of one trace."""

    def __init__(self) -> None:
        self._functions: dict[str, list[type[Function]]] = {}  # of one name, such as classes in closures

    def call(self, function: type[Function], apply: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run `apply(*arguments)` of `function` as one operation of the traced graph. Raises `Unheld`."""
        places = tuple(place for place, argument in enumerate(arguments) if isinstance(argument, Tensor))
        rest = tuple(None if place in places else argument for place, argument in enumerate(arguments))
        if not places:
            raise Unheld("none of its arguments is a tensor")
        for argument in rest:
            if not _is_plain(argument):
                raise Unheld(f"an argument of it is a {type(argument).__name__}")
        call = _Call(function, apply, rest, places)
        name = self._name(call)
        _define(name, call)
        results: list[Tensor] = getattr(torch.ops.makara, name)([arguments[place] for place in places])
        return results[0] if _DEFINED[name].single else tuple(results)

    def _name(self, call: _Call) -> str:
        said = f"{call.function.__module__}.{call.function.__qualname__} {call.arguments!r} {call.places}"
        plain = re.sub(r"\W", "_", call.function.__qualname__)
        functions = self._functions.setdefault(said, [])
        if call.function not in functions:
            functions.append(call.function)
        ordinal = functions.index(call.function)
        digest = hashlib.sha256(said.encode()).hexdigest()[:12]
        return f"{plain}_{digest}_{ordinal}" if ordinal else f"{plain}_{digest}"


def _define(name: str, call: _Call) -> None:
    if name not in _DEFINED:

        def forward_alone(tensors: list[Tensor]) -> list[Tensor]:
            return _DEFINED[name].forward_alone(tensors)

        def with_backward(tensors: list[Tensor]) -> list[Tensor]:
            return _DEFINED[name].with_backward(tensors)

        _LIBRARY.define(f"{name}(Tensor[] tensors) -> Tensor[]", tags=torch.Tag.nondeterministic_seeded)
        _LIBRARY.impl(name, forward_alone, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, with_backward, "Autograd")
        torch.library.register_fake(f"makara::{name}", forward_alone, lib=_LIBRARY)
    _DEFINED[name] = call  # another trace may have made the class anew


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, tuple | list):
        return all(_is_plain(part) for part in cast(Sequence[Any], argument))
    return isinstance(argument, _PLAIN)
