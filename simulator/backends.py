"""The kernels of a simulation: interpreted by Python, or compiled by numba from the same source.

Compiling takes seconds the first time on a machine, and importing numba nearly a second every time. `warm_up`
does both in a thread; until it is done, or where numba is not installed, the source is interpreted.
"""

from __future__ import annotations

import importlib.util
import threading

from ..pipeline.schedules import INTERPRETED as LISTER
from ..pipeline.schedules import Lister
from .engine import run
from .pipelines import Kernels
from .schedule_cache import ScheduleCache

INTERPRETED = Kernels(ScheduleCache(LISTER), run, LISTER.array, LISTER.make, LISTER.read)


def current() -> Kernels:
    """The compiled kernels if they are ready, else the interpreted ones."""
    return _COMPILER.kernels or INTERPRETED


def warm_up(*, wait: bool = False) -> bool:
    """Compile in the background, or load what an earlier process compiled; may be called repeatedly.

    `wait`: return only when it is done, for a command that ends soon; then nothing is compiled unless it can
    be cached on disk. Returns whether compiled kernels are ready; without numba they never are.
    """
    return _COMPILER.begin(wait)


def compiled(*, in_memory: bool = True) -> Kernels:
    """Compile kernels, or load them from the cache on disk. Raises `ImportError` without numba.

    Where no cache folder can be written, `in_memory` compiles them for this process alone; without it,
    `compiling.NotKept` is raised.
    """
    from .compiling import array, compile_list_schedule, compile_run, make, read

    lister = Lister(compile_list_schedule(in_memory=in_memory), array, make, read)
    return Kernels(ScheduleCache(lister), compile_run(in_memory=in_memory), array, make, read)


class _Compiler:
    """Compiles once, in a thread."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, wait: bool) -> bool:
        with self._lock:
            if self._thread is None and importlib.util.find_spec("numba"):
                arguments = {"in_memory": not wait}
                self._thread = threading.Thread(
                    target=self._run, name="compiling", kwargs=arguments, daemon=True
                )
                self._thread.start()
            thread = self._thread
        if wait and thread is not None:
            thread.join()
        return self.kernels is not None

    def _run(self, in_memory: bool) -> None:
        from .compiling import NotKept

        try:
            self.kernels = compiled(in_memory=in_memory)
        except NotKept:
            self._thread = None  # a later call without `wait` may still compile them


_COMPILER = _Compiler()
