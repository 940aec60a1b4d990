"""The processes that a trainer's own code starts (loaders of data, programs of its user's): they end with it.

A trainer leads a session of its own, and whatever it starts inherits a mark in its environment. So what is
left is found though it left the session or lost its parent. Only a process that did both, and cleared its
environment, is out of reach until its VM ends.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import psutil

log = logging.getLogger("makara.agent")

MARK = "MAKARA_TRAINER"
_ROUNDS = 5  # for those that start others while they are looked for
_WAIT_S = 1.0  # for what was killed to be gone


def kill_group(leader: int) -> None:
    """SIGKILL to a process that leads a group, and to its group. The process must not be reaped yet: its id
    might be another's."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has not become a leader yet, or all of them have ended


def end_family(leader: int, mark: str) -> None:
    """End all that a trainer, which is dead and reaped, left behind. Blocking."""
    for _ in range(_ROUNDS):
        found = list(_left(leader, mark))
        if not found:
            return
        for process in found:
            _kill(process)
        psutil.wait_procs(found, timeout=_WAIT_S)
    log.error("processes that the trainer %s started cannot be ended", mark)


def _left(leader: int, mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _belongs(process, leader, mark):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's: not ours


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool:
    if process.pid in (leader, os.getpid()):
        return False  # the leader's id, if it is taken, is a stranger's: the leader is dead
    return process.environ().get(MARK) == mark or os.getsid(process.pid) == leader


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # it was faster
