"""Runs a VM's agent as its child and, however the agent ends, ends all that it and its children started.

A child that leaves its session, forgets its environment and loses its parents is adopted by its nearest
living ancestor that is a subreaper (prctl(2)): the agent, which is one, or else this process. So neither can
be killed without the other ending what it leaves. Executed as a file, with the standard library alone, since
it runs once for each VM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

COMMAND = "MAKARA_VM_COMMAND"  # in the environment, not the arguments: this process is not taken for an agent
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.01


def adopt_orphans() -> None:
    """Make this process the parent of all below it that lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill and reap all children, and those that they leave to this process; returns when there are none."""
    while True:
        for pid in children():
            _kill(pid, signal.SIGKILL)
        if not _reap_all():
            return
        time.sleep(_LOOK_S)


def children(state: str = "") -> set[int]:
    """The ids of this process's children, adopted ones too; only those in `state` (proc(5)) if given."""
    own, found = str(os.getpid()), set[int]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            if fields[1] == own and state in ("", fields[0]):
                found.add(int(name))
    return found


def _reap_all() -> bool:
    """Reap all children that have ended; returns whether others live."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _main() -> None:
    command = json.loads(os.environ.pop(COMMAND))
    adopt_orphans()
    keeper = os.getpid()
    agent = os.fork()
    if agent == 0:
        os.setpgid(0, 0)  # so it can be told from what it starts in this session
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != keeper:
            os._exit(1)
        os.execvpe(command[0], command, os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _kill(agent, number))
    while True:
        pid, status = os.wait()
        if pid == agent:
            break
    end_children()
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl: {option}")


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


if __name__ == "__main__":
    _main()
