"""Programs that run a user's code for a command, such as `makara check`, are forks of the warm fork server.

The seed of hashes is the same in all of them; a second reading of the data is executed, with its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from forking import ForkingPopen, live

_MOST_BYTES = 1 << 16  # of a variable: the kernel refuses to execute programs with longer ones


class WarmPopen(ForkingPopen):
    """The process is no child of this one, so that the fork server is asked for its exit status."""

    _forked: BaseProcess | None = None

    def _fork(self, program: list[str], given: Mapping[str, Any], environment: dict[str, str]) -> int:
        from trainer_processes import CONTEXT  # here, as it imports torch

        values = {name: given[name] for name in ("args", "cwd", "start_new_session")}
        output = _Descriptors(given["p2cread"], given["c2pwrite"], given["errwrite"])
        arguments = (program, values, environment, output)
        self._forked = CONTEXT.Process(target=_become, args=arguments, daemon=True)
        self._forked.start()
        assert self._forked.pid is not None
        return self._forked.pid

    def _can_fork(self, program: list[str], given: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
        return (
            program[:2] == ["-m", "makara.worker.start"]
            and not given["pass_fds"]
            and all(len(value) < _MOST_BYTES for value in environment.values())
            and super()._can_fork(program, given, environment)
        )

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._forked is None:
            return super()._try_wait(wait_flags)  # pyright: ignore
        self._forked.join(0 if wait_flags & os.WNOHANG else None)
        code = self._forked.exitcode
        if code is None:
            return 0, 0
        return self.pid, -code if code < 0 else code << 8

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*arguments, **named)  # pyright: ignore
        if self.returncode is None and self._forked.exitcode is not None:
            self.returncode = self._forked.exitcode
        return self.returncode


class _Descriptors:
    """Standard input, output and error of a process to be; -1: as this process's."""

    def __init__(self, *numbers: Any) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _Descriptors, tuple(each if each == -1 else DupFd(each) for each in self.numbers)


def _become(
    program: list[str], values: dict[str, Any], environment: dict[str, str], output: _Descriptors
) -> None:
    stdin, stdout, stderr = (each if each == -1 else each.detach() for each in output.numbers)
    given = {**values, "pass_fds": (), "p2cread": stdin, "c2pwrite": stdout, "errwrite": stderr}
    live(program, given, environment, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
