"""The kernels of a simulation: as Python runs them, or compiled by numba from the same source.

Compiling takes seconds the first time on a machine, and importing numba most of one every time, so nobody
waits for it unasked: `warm_up` does both in a thread, and until it is done, or where numba is not installed,
the source is interpreted.
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
    """Compile in the background, or load what an earlier process compiled; again and again is harmless.

    `wait`: until it is done, for a command that ends soon; nothing is compiled where no folder can be written
    to keep it for the next one. Whether compiled kernels are ready; without numba they never are.
    """
    return _COMPILER.begin(wait)


def compiled(*, in_memory: bool = True) -> Kernels:
    """Kernels compiled, or loaded from what an earlier process left. Raises `ImportError` without numba.

    `in_memory`: where no folder can be written to keep them, compile them for this process alone. Without it,
    raises `compiling.NotKept` there.
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
            self._thread = None  # who does not wait may still have them compiled


_COMPILER = _Compiler()
