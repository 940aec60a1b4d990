"""The functions that go through every operation of a step: as Python runs them, or compiled by numba.

Both are made of one source (`pipeline.listing`, `pipeline.rounds`, `simulator.play`). Compiling takes seconds
the first time on a machine, and importing numba most of one every time, so nobody waits for it unasked:
`warm_up` does both in a thread, and until it is done, or where numba is not installed, the source is
interpreted.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..pipeline.flat import Cells, most_in_flight
from ..pipeline.listing import list_tasks
from ..pipeline.rounds import round_tasks
from ..pipeline.schedules import INTERPRETED as SCHEDULER
from ..pipeline.schedules import Scheduler
from .play import play
from .records import close, empty_rooms, find_open, furnish_ends, leave_open, recomputed, take_over
from .straight import play_straight


@dataclass(frozen=True, slots=True)
class Code:
    """The functions, and how their cells are copied and read."""

    scheduler: Scheduler
    most_in_flight: Callable[[Cells, int], int]
    recomputed: Callable[[Cells, int], int]
    empty_rooms: Callable[[Cells], None]
    furnish_ends: Callable[[Cells], None]
    play: Callable[[Cells, int], None]
    play_straight: Callable[[Cells, Cells], bool]
    find_open: Callable[[Cells, Cells, Cells], None]
    leave_open: Callable[[Cells, Cells], None]
    close: Callable[[Cells], None]
    take_over: Callable[[Cells, Cells, Cells], None]
    blank: Callable[[int], Cells]
    """So many cells that hold anything."""
    copied: Callable[[Any, int], Cells]
    """Followed by cells up to a length."""
    write: Callable[[Any, int, list[int]], None]
    """Over the cells from a place on."""
    read: Callable[[Any, int], list[int]]
    """The first so many cells, as a list."""
    shelf: Shelf = field(default_factory=lambda: Shelf(), compare=False)
    """Orders that were written before (see `prepared`)."""
    drawer: Drawer = field(default_factory=lambda: Drawer(), compare=False)
    """Cells to be written over: a process pays more for new pages than a play does for its operations."""


class Shelf:
    """Keeps what was used last, up to so many cells."""

    def __init__(self, most_cells: int = 1 << 22) -> None:
        self._most_cells = most_cells
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """None if it is not there."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: object, num_cells: int) -> None:
        with self._lock:
            self._kept[key] = value, num_cells
            while self._kept and sum(size for _, size in self._kept.values()) > self._most_cells:
                self._kept.popitem(last=False)


class Drawer:
    """Lends cells that hold anything, and keeps what comes back, up to so many cells."""

    def __init__(self, most_cells: int = 1 << 22) -> None:
        self._most_cells = most_cells
        self._kept: list[Cells] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, length: int, make: Callable[[int], Cells]) -> Generator[Cells]:
        """At least so many cells, for the caller alone."""
        with self._lock:
            fitting = [cells for cells in self._kept if len(cells) >= length]
            lent = fitting[-1] if fitting else None
            self._kept = [cells for cells in self._kept if cells is not lent]
        if lent is None:
            lent = make(length)
        try:
            yield lent
        finally:
            with self._lock:
                self._kept.append(lent)
                while sum(map(len, self._kept)) > self._most_cells:
                    del self._kept[0]


def _write(cells: Any, start: int, values: list[int]) -> None:
    cells[start : start + len(values)] = values


INTERPRETED = Code(
    SCHEDULER,
    most_in_flight,
    recomputed,
    empty_rooms,
    furnish_ends,
    play,
    play_straight,
    find_open,
    leave_open,
    close,
    take_over,
    blank=lambda length: [0] * length,
    copied=lambda cells, length: [*cells, *(0 for _ in range(length - len(cells)))],
    write=_write,
    read=lambda cells, length: cells[:length],
)
_SIGNATURES = {
    list_tasks: "void(int64[::1], int64[::1], boolean)",
    round_tasks: "void(int64[::1], int64[::1], int64[::1], int64, boolean)",
    most_in_flight: "int64(int64[::1], int64)",
    recomputed: "int64(int64[::1], int64)",
    empty_rooms: "void(int64[::1])",
    furnish_ends: "void(int64[::1])",
    play: "void(int64[::1], int64)",
    play_straight: "boolean(int64[::1], int64[::1])",
    find_open: "void(int64[::1], int64[::1], int64[::1])",
    leave_open: "void(int64[::1], int64[::1])",
    close: "void(int64[::1])",
    take_over: "void(int64[::1], int64[::1], int64[::1])",
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

    from .compiling import compile_all

    def hold(values: Sequence[int], length: int) -> Any:
        cells = numpy.zeros(length, numpy.int64)
        cells[: len(values)] = values
        return cells

    def copied(cells: Any, length: int) -> Any:
        result = numpy.empty(length, numpy.int64)
        result[: len(cells)] = cells
        result[len(cells) :] = 0
        return result

    one = compile_all(_SIGNATURES)
    return Code(
        Scheduler(hold, one[0], one[1]),
        *one[2:],
        blank=lambda length: numpy.empty(length, numpy.int64),
        copied=copied,
        write=_write,
        read=lambda cells, length: cells[:length].tolist(),
    )


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
