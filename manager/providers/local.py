"""VMs that are process groups on this machine: one session each, a folder of its own, found again by a tag.

`<home>/vms/<vm>/` holds `boot.json` (mode 0600), `vm.json` (process id and start time), `agent.log`, and
whatever the agent and its trainers write; once the VM has ended, its logs alone. VMs outlive the manager: a
new one finds them by `vm.json`, or by the tag in their environment, if the old one died before it could write
that: MAKARA_VM is the VM's name, and MAKARA_VM_FOLDER its folder, since other managers on this machine may
have VMs of the same name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ...protocol.messages import BootConfig, NoticeFile
from ..config import write_private
from ..spec.job_spec import Resources
from ..spec.placement import Attempt, Market, Offer, Placement, Price
from . import Ended, FaultKind, NoCapacity, NotAllowed, ProviderError, Resource, ResourceStatus, statuses

log = logging.getLogger("makara.manager")

_NAME = "MAKARA_VM"
_PLACE = "MAKARA_VM_FOLDER"
_TERM_GRACE_S = 3.0
_CONSOLE_BYTES = 8 << 10
_RECORD = "vm.json"
_ENDED: dict[str, Any] = {"ended": True}


class LocalProvider:
    """VMs below `folder`. `changed` is called from a thread as soon as a VM of this process ends."""

    def __init__(
        self,
        folder: Path,
        *,
        command: tuple[str, ...] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._command = command or (sys.executable, "-P", "-m", "makara.worker.agent")
        self._changed = changed
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._notices: dict[str, threading.Timer] = {}
        self._capacity: int | None = None
        self._closed = False
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*/vm.json"):
            if self._record(path.parent.name) == _ENDED:
                _clear(path.parent)  # what could not be removed at its end, or is of an earlier version
        self._adopt()
        self._resume_notices()

    # ---- the provider's contract ---------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        """A VM that has ended is not created again, whatever the attempt."""
        directory = self._folder / boot.vm
        with self._lock:
            if (directory / _RECORD).exists():
                if self._status(boot.vm) is ResourceStatus.GONE:
                    raise Ended(f"local VM {boot.vm} has ended")
                return boot.vm
            if self._capacity is not None and self._num_running() >= self._capacity:
                raise NoCapacity(f"no local VM to be had now: {self._capacity} may live at a time")
            try:
                write_private(directory / "boot.json", boot.model_dump_json().encode())
                self._spawn(boot.vm, directory)
            except OSError as error:
                raise NotAllowed(f"cannot start local VM {boot.vm}: {error}") from error
        return boot.vm

    def release(self, vm: str) -> bool:
        timer = self._notices.pop(vm, None)
        if timer is not None:
            timer.cancel()
        members = self._members(vm)
        for process in members:
            _signal(process, signal.SIGCONT)
        leader = self._leader(vm)
        if leader is not None:
            _signal(leader, signal.SIGTERM)
            psutil.wait_procs([leader], timeout=_TERM_GRACE_S)
        self._kill(vm)
        self._remember_end(vm)
        return True

    def look(self, vm: str) -> Sequence[Resource]:
        return [resource for resource in self.list() if resource.vm == vm]

    def list(self) -> Sequence[Resource]:
        with self._lock:  # never between the start of a VM and its record
            vms = [path.parent.name for path in self._folder.glob("*/vm.json")]
            return [Resource(vm=vm, attempt=1, id=vm, status=self._status(vm)) for vm in vms]

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return []

    def offers(self, resources: Resources) -> Sequence[Offer]:
        """As many as this machine can bear, for nothing."""
        price = Price(hourly=0.0, ceiling=0.0, at=time.time(), source="this machine")
        return [Offer(placement=Placement(provider="local", market=Market.ON_DEMAND), price=price)]

    def console(self, vm: str) -> str:
        try:
            return (self._folder / vm / "agent.log").read_bytes()[-_CONSOLE_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def set_capacity(self, vms: int | None) -> None:
        """How many VMs may live at a time from now on; None is any number. None that lives is taken."""
        self._capacity = vms

    # ---- faults --------------------------------------------------------------------------------------------

    def inject(self, vm: str, kind: FaultKind, deadline_s: float = 0.0) -> None:
        if statuses(self.look(vm)).get(vm) is not ResourceStatus.RUNNING:
            raise ProviderError(f"local VM {vm} is not running")
        if kind == "kill":
            self._kill(vm)
        elif kind == "notice":
            notice = NoticeFile(deadline_s=deadline_s, written_at=time.time())
            write_private(self._folder / vm / "notice.json", notice.model_dump_json().encode())
            self._kill_later(vm, deadline_s)
        else:
            number = signal.SIGSTOP if kind == "stop" else signal.SIGCONT
            leader = self._leader(vm)
            for process in self._members(vm):
                if leader is None or process.pid != leader.pid:
                    _signal(process, number)

    def close(self) -> None:
        """Forget timers; VMs live on."""
        self._closed = True
        for timer in self._notices.values():
            timer.cancel()

    # ---- processes -----------------------------------------------------------------------------------------

    def _spawn(self, vm: str, directory: Path) -> None:
        with open(directory / "agent.log", "ab") as log:
            child = subprocess.Popen(
                [*self._command, str(directory / "boot.json")],
                cwd=directory,
                env={**os.environ, _NAME: vm, _PLACE: _place(directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # SIGINT in the user's terminal is not for VMs
            )
        self._children[vm] = child
        self._remember_start(vm, child.pid)
        threading.Thread(target=self._watch, args=(vm, child), name=f"watch {vm}", daemon=True).start()

    def _watch(self, vm: str, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        if not self._closed:
            self._status(vm)
            self._changed()

    def _adopt(self) -> None:
        """Write down VMs that an earlier manager started and had no time to record."""
        for path in self._folder.glob("*/boot.json"):
            vm = path.parent.name
            if self._record(vm) is None:
                leader = next((p for p in _tagged(vm, path.parent) if _session(p.pid) == p.pid), None)
                if leader is not None:
                    self._remember_start(vm, leader.pid)

    def _status(self, vm: str) -> ResourceStatus:
        if self._leader(vm) is not None:
            return ResourceStatus.RUNNING
        if self._record(vm) != _ENDED:
            self._kill(vm)  # a VM whose agent is gone is gone: no trainer stays behind
            self._remember_end(vm)
        return ResourceStatus.GONE

    def _num_running(self) -> int:
        return sum(self._leader(path.parent.name) is not None for path in self._folder.glob("*/vm.json"))

    def _record(self, vm: str) -> dict[str, Any] | None:
        try:
            return json.loads((self._folder / vm / "vm.json").read_bytes())
        except FileNotFoundError:
            return None

    def _remember_start(self, vm: str, pid: int) -> None:
        record = {"pid": pid, "started": _start_time(pid), "boot": _boot_id()}
        write_private(self._folder / vm / "vm.json", json.dumps(record).encode())

    def _remember_end(self, vm: str) -> None:
        """From now on nobody looks for its processes; and a repeated request does not bring it back."""
        directory = self._folder / vm
        with self._ending:  # its watcher and whoever releases it may both be here
            if directory.is_dir() and self._record(vm) != _ENDED:
                write_private(directory / "vm.json", json.dumps(_ENDED).encode())
                _clear(directory)

    def _leader(self, vm: str) -> psutil.Process | None:
        """The living agent process of `vm`."""
        record = self._record(vm)
        if record is None or record == _ENDED:
            return None
        return _living(int(record["pid"]), float(record["started"]), record.get("boot"))

    def _members(self, vm: str) -> list[psutil.Process]:
        """All living processes of the VM: its session, and what carries its tag."""
        leader = self._leader(vm)
        found = {} if leader is None else {leader.pid: leader}
        if leader is not None:
            for process in _children(leader):
                found[process.pid] = process
        for process in _tagged(vm, self._folder / vm):
            found[process.pid] = process
        return list(found.values())

    def _kill(self, vm: str) -> None:
        leader = self._leader(vm)
        if leader is not None and _session(leader.pid) == leader.pid:
            _kill_group(leader.pid)
        for process in self._members(vm):
            _signal(process, signal.SIGKILL)

    # ---- notices -------------------------------------------------------------------------------------------

    def _kill_later(self, vm: str, delay_s: float) -> None:
        timer = threading.Timer(delay_s, self._kill, (vm,))
        timer.daemon = True
        self._notices[vm] = timer
        timer.start()

    def _resume_notices(self) -> None:
        for path in self._folder.glob("*/notice.json"):
            notice = NoticeFile.model_validate_json(path.read_bytes())
            if self._leader(path.parent.name) is not None:
                passed_s = max(0.0, time.time() - notice.written_at)  # the wall clock may have been set
                self._kill_later(path.parent.name, max(0.0, notice.deadline_s - passed_s))


def _clear(directory: Path) -> None:
    """Remove what a VM that ended has no more use for: its code and whatever that wrote; logs stay."""
    for path in directory.iterdir():
        if path.name == _RECORD or path.match("*.log") or path.match("*.log.1"):
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:  # a process that was just killed may be in it still
            log.warning("VM folder %s: %s is left behind: %s", directory, path.name, error)


def _living(pid: int, started: float, boot: str | None) -> psutil.Process | None:
    """The process if it lives and is the one that was started then (ids are used again); a zombie is dead.

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
    """When the process began, in a unit of the system's own that does not change when the wall clock is set.

    0.0 if it has ended already: no process has this start time.
    """
    try:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            return float(
                stat.read_text().rpartition(")")[2].split()[19]
            )  # field 22: clock ticks since the boot
        return psutil.Process(pid).create_time()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return 0.0


def _boot_id() -> str:
    """Names this run of the machine: start times of another are not to be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _tagged(vm: str, directory: Path) -> Iterator[psutil.Process]:
    """The processes of the VM; what earlier versions started has no folder in its tag."""
    place = _place(directory)
    for process in psutil.process_iter():
        try:
            tag = process.environ()
            ours = tag.get(_NAME) == vm and tag.get(_PLACE, place) == place
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's: not ours


def _place(directory: Path) -> str:
    return str(directory.resolve())


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it was faster
        process.send_signal(number)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.killpg(pid, signal.SIGKILL)
