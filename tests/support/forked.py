"""Programs forked from a process that has imported them: they start in milliseconds instead of a second."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from forking import fork_programs
from trainer_processes import CONTEXT


class Forked:
    """`main(*arguments)` in a process of its own, used as a `subprocess.Popen`. What it prints is appended
    to `log`; its exit status is what `main` returns."""

    def __init__(
        self, main: Callable[..., object], *arguments: object, log: Path, environment: Mapping[str, str]
    ) -> None:
        log.touch()
        run = (str(log), dict(environment), main, arguments)
        self._process = CONTEXT.Process(target=_run, args=run, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return None if self._process.is_alive() else self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _run(
    log: str, environment: dict[str, str], main: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    fork_programs()
    raise SystemExit(main(*arguments))
