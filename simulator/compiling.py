"""Kernels compiled by numba, over numpy arrays of records. Importing numba takes nearly a second.

`_nrt=False` (private, checked with numba 0.68) turns off reference counting of arrays, which otherwise takes
nine tenths of the time. That is safe: kernels create no arrays, and the caller holds those it passes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numba
import numpy

from ..pipeline.arrays import Array, Arrays, Entry, ForwardTurn
from ..pipeline.list_schedule import ListHop, ListWorker, Queued, list_schedule
from .engine import run
from .fields import Arrival, Link, SimHop, SimOperation, SimWorker, State, Wire

_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False}
Record = TypeVar("Record")


class NotKept(Exception):
    """Neither the package's folder nor the user's cache can be written, so kernels cannot be cached."""


def compile_list_schedule(*, in_memory: bool) -> Callable[..., None]:
    """Compile `list_schedule`; see `compile_kernel`."""
    records = (ListWorker, ListHop, ForwardTurn, Entry, Queued)
    return compile_kernel(list_schedule, tuple(make(record, 0) for record in records), in_memory=in_memory)


def compile_run(*, in_memory: bool) -> Callable[[State, int], None]:
    """Compile `engine.run`; see `compile_kernel`."""
    records = (SimWorker, SimHop, SimOperation, Link, Wire, Arrival, ForwardTurn, Entry)
    arrays: list[Any] = [make(record, 0) for record in records]
    return compile_kernel(run, (State(*arrays), 0), in_memory=in_memory)


def compile_kernel(function: Any, example: tuple[Any, ...], *, in_memory: bool) -> Any:
    """Compile a function, and what it calls, for arguments like those of `example`, or load it from the cache
    on disk.

    Where it cannot be cached, `in_memory` compiles it for this process alone; without it, raises `NotKept`.
    """
    signature = tuple(numba.typeof(argument) for argument in example)
    twin = _with_compiled_callees(function, {})
    twin.__qualname__ = f"{function.__qualname__}_{_digest()}"  # numba's cache is keyed by this name
    try:
        return numba.njit(signature, cache=True, **_OPTIONS)(twin)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        if not in_memory:
            raise NotKept(str(error)) from error
    return numba.njit(signature, **_OPTIONS)(twin)


def _with_compiled_callees(function: Any, compiled: dict[Any, Any]) -> Any:
    """The same function with its callees compiled and inlined; else each operation calls the policy."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    for callee in filter(inspect.isfunction, named.values()):
        if callee not in compiled:
            compiled[callee] = numba.njit(forceinline=True, **_OPTIONS)(
                _with_compiled_callees(callee, compiled)
            )
    callees = {name: compiled[value] for name, value in named.items() if inspect.isfunction(value)}
    twin = FunctionType(function.__code__, {**function.__globals__, **callees}, function.__name__)
    twin.__module__ = function.__module__
    return twin


def _digest() -> str:
    """A digest of all sources: numba itself checks only a function's own file, not those of its callees."""
    found = hashlib.sha256()
    for name in ("pipeline", "simulator", "morphing"):
        for path in sorted((Path(__file__).parent.parent / name).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _array(record: type[Record], values: Sequence[Record]) -> Array[Record]:
    """Make an array of these records."""
    row = attrgetter(*_names(record))
    return _as_records(record, numpy.array([row(value) for value in values], numpy.int64))


def make(record: type[Record], length: int) -> Array[Record]:
    """Make an array of `length` records with default values."""
    rows = numpy.empty((length, len(_names(record))), numpy.int64)
    rows[:] = attrgetter(*_names(record))(record())
    return _as_records(record, rows)


def _read(record: type[Record], held: Any) -> list[Record]:
    """The records of an array."""
    rows = held.view(numpy.int64).reshape(len(held), len(_names(record)))
    return [record(*row) for row in rows.tolist()]


def _column(held: Any, name: str) -> Sequence[int]:
    return held[name].tolist()


def _set_column(held: Any, name: str, values: Sequence[int]) -> None:
    held[name] = values


RECORDS = Arrays(_array, make, _read, _column, _set_column)
"""Of compiled code."""


def _as_records(record: type[Any], rows: Any) -> Any:
    """View rows of numbers as an array with named columns."""
    columns = numpy.dtype([(name, numpy.int64) for name in _names(record)])
    return rows.view(columns).reshape(len(rows))


def _names(record: Any) -> list[str]:
    return [field.name for field in fields(record)]
