"""Finds and ends the processes of a VM that shares its machine with others.

`<folder>/vm.json` names the VM's leader, the parent of its agent (`vm_keeper.py`), by process id and start
time. Processes that the agent starts have two marks in their environment: MAKARA_VM, the VM's name, and
MAKARA_VM_FOLDER, its folder, since other managers on this machine may have VMs of the same name. A process
that removed its marks is still below the leader or the agent, which adopt what loses its parents.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from . import vm_keeper

RECORD = "vm.json"
_NAME = "MAKARA_VM"
_PLACE = "MAKARA_VM_FOLDER"
_TERM_GRACE_S = 3.0
_ROUNDS = 5  # since processes may start others meanwhile
_DEAD_S, _LOOK_S = 1.0, 0.005  # for killed processes to be dead


class VmProcesses:
    """The processes of VM `vm` in `folder`, whichever process started them."""

    def __init__(self, vm: str, folder: Path) -> None:
        self._vm = vm
        self._folder = folder

    def start(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the agent in a session of its own, with `variables` of its own. The caller writes `record` of
        the returned process, the leader, to the folder. Raises `OSError`."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"{command[0]}: no such program, or it cannot be executed")
        marks = {_NAME: self._vm, _PLACE: _place(self._folder), vm_keeper.COMMAND: json.dumps(list(command))}
        with open(self._folder / "agent.log", "ab") as log:
            return subprocess.Popen(
                (sys.executable, "-I", "-S", vm_keeper.__file__),
                cwd=self._folder,
                env={**os.environ, **(variables or {}), **marks},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # SIGINT in the user's terminal is not for VMs
            )

    def recorded(self) -> dict[str, Any] | None:
        """The content of `vm.json`; None if it does not exist."""
        try:
            return json.loads((self._folder / RECORD).read_bytes())
        except FileNotFoundError:
            return None

    def leader(self) -> psutil.Process | None:
        """The living process that `vm.json` names."""
        found = self.recorded()
        if found is None or "pid" not in found:
            return None
        return _living(int(found["pid"]), float(found["started"]), found.get("boot"))

    def unrecorded_leader(self) -> int | None:
        """The process id of a leader that was started but not recorded."""
        return next((p.pid for p in self._tagged() if _session(p.pid) == p.pid), None)

    def members(self) -> list[psutil.Process]:
        """All living processes of the VM: its leader, those with its marks, and all below these."""
        leader = self.leader()
        waiting = [*([] if leader is None else [leader]), *self._tagged()]
        below, found = _by_parent(), dict[int, psutil.Process]()
        while waiting:
            process = waiting.pop()
            if process.pid not in found:
                found[process.pid] = process
                waiting += below.get(process.pid, [])
        return list(found.values())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all members."""
        for process in self.members():
            _signal(process, number)

    def signal_trainers(self, number: signal.Signals) -> None:
        """Send a signal to all members except the leader and the agent."""
        for process in self._split()[1]:
            _signal(process, number)

    def end(self) -> None:
        """Let the agent end, and kill what is left a moment later. Blocking."""
        self.signal(signal.SIGCONT)
        leader = self.leader()
        if leader is not None:
            _signal(leader, signal.SIGTERM)
            psutil.wait_procs([leader], timeout=_TERM_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill all members. Blocking.

        The leader and the agent are stopped, and killed last: what loses its parents is found below them.
        """
        for _ in range(_ROUNDS):
            adopting, others = self._split()
            for process in adopting:
                _signal(process, signal.SIGSTOP)
            for process in others:
                _signal(process, signal.SIGKILL)
            if not others:
                break
            _wait_dead(others)
        for process in self._split()[0]:
            _signal(process, signal.SIGKILL)

    def _split(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """(the leader and the agent, who lead the groups of the leader's session; all other members)."""
        leader = (self.recorded() or {}).get("pid") or self.unrecorded_leader()
        adopting: list[psutil.Process] = []
        others: list[psutil.Process] = []
        for process in self.members():
            leads = _session(process.pid) == leader and _group(process.pid) == process.pid
            (adopting if leads else others).append(process)
        return adopting, others

    def _tagged(self) -> Iterator[psutil.Process]:
        """Processes with the marks; those of earlier versions have only the name."""
        place = _place(self._folder)

        def is_ours(process: psutil.Process) -> bool:
            marks = process.environ()
            return marks.get(_NAME) == self._vm and marks.get(_PLACE, place) == place

        return processes_where(is_ours)


def processes_where(belongs: Callable[[psutil.Process], bool]) -> Iterator[psutil.Process]:
    """Processes that `belongs` accepts, without zombies."""
    for process in psutil.process_iter():
        try:
            if belongs(process) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's: not ours


def _by_parent() -> dict[int, list[psutil.Process]]:
    """{process id: its children}, without zombies, of all processes of this machine."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(process.ppid(), []).append(process)
    return found


def _wait_dead(processes: Sequence[psutil.Process]) -> None:
    """Wait until these are dead, though perhaps not reaped, since their parents may be stopped; bounded."""
    stop = time.monotonic() + _DEAD_S
    while any(map(_lives, processes)) and time.monotonic() < stop:
        time.sleep(_LOOK_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_group(leader: int) -> None:
    """Send SIGKILL to a group leader and its group. The leader must not have been reaped: its id might be
    another's."""
    with contextlib.suppress(ProcessLookupError):  # it has not become a leader yet, or all of them have ended
        os.killpg(leader, signal.SIGKILL)


def record(pid: int) -> bytes:
    """The content of `vm.json` for an agent that was just started."""
    return json.dumps({"pid": pid, "started": _start_time(pid), "boot": _boot_id()}).encode()


def _living(pid: int, started: float, boot: str | None) -> psutil.Process | None:
    """The process if it lives and was started then, since ids are reused; None for a zombie.

    A record without `boot` is of an earlier version, which wrote Unix seconds.
    """
    try:
        process = psutil.Process(pid)
        if boot is None:
            same = abs(process.create_time() - started) < 0.05
        else:
            same = boot == _boot_id() and _start_time(pid) == started
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _start_time(pid: int) -> float:
    """The process's start time, in a unit of the system that does not change when the wall clock is set.

    0.0, which no process has, if it has ended already.
    """
    try:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            ticks = stat.read_text().rpartition(")")[2].split()[19]  # field 22: since the boot
            return float(ticks)
        return psutil.Process(pid).create_time()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return 0.0


def _boot_id() -> str:
    """An id of this boot of the machine: start times of different boots must not be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def _place(folder: Path) -> str:
    return str(folder.resolve())


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        process.send_signal(number)
