"""Says what a command does while it makes its user wait."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

_EVERY_S = 5.0


def writer(options: argparse.Namespace) -> Callable[[str], None]:
    """Where stages are written: on stderr at once; nowhere with `--json`."""
    return (lambda _: None) if options.json else partial(print, file=sys.stderr, flush=True)


class Stages:
    """Writes a line when a stage begins, and one every few seconds while it lasts; a context manager.

    The lines are the same on a terminal and in a file: none is overwritten. A thread writes the later ones.
    """

    def __init__(self, write: Callable[[str], None], every_s: float = _EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._lock = threading.Lock()  # of the next two
        self._stage = ""
        self._began = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before has ended."""
        with self._lock:
            self._stage, self._began = stage, time.monotonic()
            self._write(f"{stage} ...")

    def __enter__(self) -> Stages:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                seconds = time.monotonic() - self._began
                if self._stage and seconds >= self._every_s / 2:
                    self._write(f"{self._stage}: {seconds:.0f} s")
