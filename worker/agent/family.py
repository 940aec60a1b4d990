"""Ends the processes that a trainer's own code started (data loaders, other programs).

A trainer leads a session, and processes that it starts inherit a mark in their environment. So its children
are found even if they left the session or lost their parent. A process that left the session and cleared its
environment lives until its VM ends: then the agent, which adopted it, ends it (`protocol/vm_keeper.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

import psutil

from ...protocol import vm_keeper
from ...protocol.vm_processes import processes_where

log = logging.getLogger("makara.agent")

MARK = "MAKARA_TRAINER"
_ROUNDS = 5  # since processes may start others meanwhile
_WAIT_S = 1.0  # for killed processes to be gone
_REAPED_EVERY_S = 10.0


class Orphans:
    """Reaps processes that this one adopted. Call `reap` often, on the event loop."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._next_at = 0.0

    def reap(self) -> None:
        """Reap children that had ended at the last look as well: others' ends are being waited for here."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + _REAPED_EVERY_S
        ended = vm_keeper.children("Z")
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended - self._ended


def end_family(leader: int, mark: str) -> None:
    """End all processes that a dead and reaped trainer left behind. Blocking."""
    for _ in range(_ROUNDS):
        found = list(processes_where(lambda process: _belongs(process, leader, mark)))
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                process.kill()
        psutil.wait_procs(found, timeout=_WAIT_S)
    log.error("processes that the trainer %s started cannot be ended", mark)


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool:
    if process.pid in (leader, os.getpid()):
        return False  # the leader is dead, so its id may have been reused
    return process.environ().get(MARK) == mark or os.getsid(process.pid) == leader
