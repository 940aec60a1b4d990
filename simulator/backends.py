"""Kernels, of a simulation and others: interpreted by Python, or compiled by numba from the same source.

Compiling takes seconds the first time on a machine, and importing numba nearly a second every time. `warm_up`
does both in threads; until it is done, or where numba is not installed, the source is interpreted.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from ..pipeline.schedules import INTERPRETED as LISTER
from ..pipeline.schedules import Lister
from .engine import run
from .pipelines import Kernels
from .schedule_cache import ScheduleCache

T = TypeVar("T")

INTERPRETED = Kernels(ScheduleCache(LISTER), run, LISTER.arrays)


def current() -> Kernels:
    """The compiled kernels if they are ready, else the interpreted ones."""
    return _COMPILER.ready or INTERPRETED


def warm_up(*, wait: bool = False) -> bool:
    """Compile in the background, or load what an earlier process compiled; may be called repeatedly.

    `wait`: return only when it is done, for a command that ends soon; then nothing is compiled unless it can
    be cached on disk. Returns whether compiled kernels are ready; without numba they never are.
    """
    for compiler in Compiler.all:
        compiler.begin(compile_in_memory=not wait)
    return all([compiler.wait() if wait else compiler.ready is not None for compiler in Compiler.all])


def compiled(*, in_memory: bool = True) -> Kernels:
    """Compile kernels, or load them from the cache on disk. Raises `ImportError` without numba.

    Where no cache folder can be written, `in_memory` compiles them for this process alone; without it,
    `compiling.NotKept` is raised.
    """
    from .compiling import RECORDS, compile_list_schedule, compile_run

    lister = Lister(compile_list_schedule(in_memory=in_memory), RECORDS)
    return Kernels(ScheduleCache(lister), compile_run(in_memory=in_memory), RECORDS)


class Compiler(Generic[T]):
    """Compiles once, in a thread, when `warm_up` is called."""

    all: ClassVar[list[Compiler[Any]]] = []

    def __init__(self, compile: Callable[[bool], T]) -> None:
        """`compile(in_memory)` returns what is compiled; see `compiled`."""
        self.ready: T | None = None
        self._compile = compile
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.all.append(self)

    def begin(self, *, compile_in_memory: bool) -> None:
        """Compile, if numba is installed and nothing has begun to."""
        with self._lock:
            if self._thread is None and importlib.util.find_spec("numba"):
                self._thread = threading.Thread(
                    target=self._run, name="compiling", args=[compile_in_memory], daemon=True
                )
                self._thread.start()

    def wait(self) -> bool:
        """Wait until what has begun is done. Returns whether it is ready."""
        thread = self._thread
        if thread is not None:
            thread.join()
        return self.ready is not None

    def _run(self, in_memory: bool) -> None:
        from .compiling import NotKept

        try:
            self.ready = self._compile(in_memory)
        except NotKept:
            self._thread = None  # a later call without `wait` may still compile it


_COMPILER = Compiler(lambda in_memory: compiled(in_memory=in_memory))
