"""Functions over cells, compiled by numba, whose import takes most of a second.

What is compiled sees its cells through numba's pointers (checked with numba 0.68). Of an array, numba counts
references at every call, and asks of every index whether it is negative: an operation of a play takes twice
as long then.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic


def compile_all(signatures: dict[Callable[..., Any], str]) -> list[Any]:
    """The functions and those of ours that they call, or what an earlier process left of them.

    `signatures` name what callers pass: arrays `int64[::1]` for cells, and numbers.
    """
    digest = _digest()
    made: dict[Any, Any] = {}
    return [_entry(function, signature, made, digest) for function, signature in signatures.items()]


def _entry(function: Any, signature: str, made: dict[Any, Any], digest: str) -> Any:
    """What a caller calls."""
    caller = _CALLERS[len(inspect.signature(function).parameters)]
    named = {"_inner": _compile(function, made), "_bare": _bare}
    twin = FunctionType(caller.__code__, named, function.__name__)
    twin.__module__ = __name__
    twin.__qualname__ = f"{function.__qualname__}_{digest}"  # what is kept on disk goes by this
    return numba.njit(signature, nogil=True, cache=True)(twin)


def _compile(function: Any, made: dict[Any, Any]) -> Any:
    """Inlined into its callers: left to itself, the compiler calls the policy anew for each operation."""
    if function not in made:
        named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        ours = {name: value for name, value in named.items() if inspect.isfunction(value)}
        compiled = {name: _compile(value, made) for name, value in ours.items()}
        twin = FunctionType(function.__code__, {**function.__globals__, **compiled}, function.__name__)
        twin.__module__ = function.__module__
        made[function] = numba.njit(forceinline=True, nogil=True)(twin)
    return made[function]


def _bare_cells(_: Any, value: Any) -> Any:
    """Of an array, the pointer to its first cell; of a number, itself."""

    def itself(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    def first(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    if isinstance(value, types.Array):
        return types.CPointer(value.dtype)(value), first
    return value(value), itself


_bare: Any = intrinsic(_bare_cells)


def _inner(*_: Any) -> Any:
    """Where callers are compiled, what they call stands in its place."""
    raise NotImplementedError


def _with_one(a: Any) -> Any:
    return _inner(_bare(a))


def _with_two(a: Any, b: Any) -> Any:
    return _inner(_bare(a), _bare(b))


def _with_three(a: Any, b: Any, c: Any) -> Any:
    return _inner(_bare(a), _bare(b), _bare(c))


def _with_five(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    return _inner(_bare(a), _bare(b), _bare(c), _bare(d), _bare(e))


_CALLERS = {1: _with_one, 2: _with_two, 3: _with_three, 5: _with_five}
"""By the number of arguments."""


def _digest() -> str:
    """Of all sources: numba itself looks only at the file of a function, not at those that it calls."""
    found = hashlib.sha256()
    for name in ("pipeline", "simulator"):
        for path in sorted((Path(__file__).parent.parent / name).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
