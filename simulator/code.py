"""The functions that go through every operation of a step: as Python runs them, or compiled by numba.

Both are made of one source (`pipeline.listing`, `pipeline.rounds`, `simulator.play`). Compiling takes seconds
the first time on a machine, and importing numba most of one every time, so nobody waits for it unasked:
`warm_up` does both in a thread, and until it is done, or where numba is not installed, the source is
interpreted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from ..pipeline.flat import Cells, most_in_flight
from ..pipeline.listing import list_tasks
from ..pipeline.rounds import round_tasks
from ..pipeline.schedules import INTERPRETED as SCHEDULER
from ..pipeline.schedules import Scheduler
from .play import play
from .records import close, empty_rooms, leave_open, take_over
from .straight import play_straight


@dataclass(frozen=True, slots=True)
class Code:
    """The functions, and how their cells are copied and read."""

    scheduler: Scheduler
    most_in_flight: Callable[[Cells, int], int]
    empty_rooms: Callable[[Cells], None]
    play: Callable[[Cells, int], bool]
    play_straight: Callable[[Cells], bool]
    leave_open: Callable[[Cells, Cells], None]
    close: Callable[[Cells], None]
    take_over: Callable[[Cells, Cells], None]
    copied: Callable[[Any, int], Cells]
    """Followed by cells up to a length."""
    write: Callable[[Any, int, list[int]], None]
    """Over the cells from a place on."""
    read: Callable[[Any, int], list[int]]
    """The first so many cells, as a list."""
    shelf: Shelf = field(default_factory=lambda: Shelf(), compare=False)
    """Orders that were written before (see `prepared`)."""


class Shelf:
    """Keeps what was used last, up to so many cells."""

    def __init__(self, most_cells: int = 1 << 22) -> None:
        self._most_cells = most_cells
        self._kept: OrderedDict[Hashable, Cells] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Cells | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, cells: Cells) -> None:
        with self._lock:
            self._kept[key] = cells
            while self._kept and sum(len(kept) for kept in self._kept.values()) > self._most_cells:
                self._kept.popitem(last=False)


def _write(cells: Any, start: int, values: list[int]) -> None:
    cells[start : start + len(values)] = values


INTERPRETED = Code(
    SCHEDULER,
    most_in_flight,
    empty_rooms,
    play,
    play_straight,
    leave_open,
    close,
    take_over,
    copied=lambda cells, length: [*cells, *(0 for _ in range(length - len(cells)))],
    write=_write,
    read=lambda cells, length: cells[:length],
)
_SIGNATURES = {
    list_tasks: "void(int64[::1], int64[::1], boolean)",
    round_tasks: "void(int64[::1], int64[::1], int64[::1], boolean)",
    most_in_flight: "int64(int64[::1], int64)",
    empty_rooms: "void(int64[::1])",
    play: "boolean(int64[::1], int64)",
    play_straight: "boolean(int64[::1])",
    leave_open: "void(int64[::1], int64[::1])",
    close: "void(int64[::1])",
    take_over: "void(int64[::1], int64[::1])",
}


def current() -> Code:
    """The compiled functions if they are ready, else the interpreted ones."""
    return _COMPILER.code or INTERPRETED


def warm_up(*, wait: bool = False) -> bool:
    """Compile in the background, or load what an earlier process compiled; again and again is harmless.

    `wait`: until it is done. Whether compiled code is ready; without numba it never is.
    """
    return _COMPILER.begin(wait)


def compiled() -> Code:
    """The functions compiled, or loaded from what an earlier process left. Raises `ImportError`."""
    import numpy

    def hold(values: Sequence[int], length: int) -> Any:
        cells = numpy.zeros(length, numpy.int64)
        cells[: len(values)] = values
        return cells

    def copied(cells: Any, length: int) -> Any:
        result = numpy.empty(length, numpy.int64)
        result[: len(cells)] = cells
        result[len(cells) :] = 0
        return result

    made: dict[Any, Any] = {}
    one = [_compile(function, made, _digest()) for function in _SIGNATURES]
    return Code(
        Scheduler(hold, one[0], one[1]),
        *one[2:],
        copied=copied,
        write=_write,
        read=lambda cells, length: cells[:length].tolist(),
    )


def _compile(function: Any, made: dict[Any, Any], digest: str) -> Any:
    """The function and those of ours that it calls."""
    import numba  # only here: it takes most of a second

    if function not in made:
        named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        ours = {name: value for name, value in named.items() if inspect.isfunction(value)}
        compiled = {name: _compile(value, made, digest) for name, value in ours.items()}
        twin = FunctionType(function.__code__, {**function.__globals__, **compiled}, function.__name__)
        twin.__module__ = function.__module__
        twin.__qualname__ = f"{function.__qualname__}_{digest}"
        signature = _SIGNATURES.get(function)
        options: dict[str, Any] = {"nogil": True, "cache": signature is not None}
        made[function] = (
            numba.njit(signature, **options)(twin)
            if signature
            else numba.njit(forceinline=True, **options)(twin)
        )
    return made[function]


def _digest() -> str:
    """Of all sources: numba itself looks only at the file of a function, not at those that it calls."""
    found = hashlib.sha256()
    for name in ("pipeline", "simulator"):
        for path in sorted((Path(__file__).parent.parent / name).glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


class _Compiler:
    """Compiles once, in a thread."""

    def __init__(self) -> None:
        self.code: Code | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, wait: bool) -> bool:
        with self._lock:
            if self._thread is None and importlib.util.find_spec("numba"):
                self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
                self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        return self.code is not None

    def _run(self) -> None:
        self.code = compiled()


_COMPILER = _Compiler()
