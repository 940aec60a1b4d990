"""Ends the processes that a trainer's own code started (data loaders, other programs).

A trainer leads a session, and processes that it starts inherit a mark in their environment. So its children
are found even if they left the session or lost their parent. Only a process that left the session and cleared
its environment lives until its VM ends.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import psutil

log = logging.getLogger("makara.agent")

MARK = "MAKARA_TRAINER"
_ROUNDS = 5  # since processes may start others meanwhile
_WAIT_S = 1.0  # for killed processes to be gone


def kill_group(leader: int) -> None:
    """Send SIGKILL to a group leader and its group. The leader must not be reaped yet: its id might be
    reused."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has not become a leader yet, or all of them have ended


def end_family(leader: int, mark: str) -> None:
    """End all processes that a dead and reaped trainer left behind. Blocking."""
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
        return False  # the leader is dead, so its id may have been reused
    return process.environ().get(MARK) == mark or os.getsid(process.pid) == leader


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # it has ended already
