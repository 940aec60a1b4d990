"""VMs that are process groups on this machine, each with a session and a folder of its own.

`<home>/vms/<vm>/` holds `boot.json` (mode 0600), `vm.json` (process id and start time), `gpus.json` (which of
the machine's GPUs it has), `agent.log`, and files of the agent and its trainers; once the VM has ended, only
its logs. VMs outlive the manager. A new manager finds them by `vm.json`, or, if the old one died before
writing that, by their environment: MAKARA_VM is the VM's name, and MAKARA_VM_FOLDER its folder, since other
managers on this machine may have VMs of the same name.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ...protocol.gpus import VISIBLE, shown_gpus
from ...protocol.messages import BootConfig, NoticeFile
from ...protocol.vm_processes import RECORD, VmProcesses, record
from ...protocol.wiping import wipe
from ..config import write_private
from ..spec.job_spec import Resources
from ..spec.placement import Attempt, Market, Offer, Placement, Price
from . import Ended, NoCapacity, NotAllowed, ProviderError, Resource, ResourceStatus, statuses

FaultKind = Literal["kill", "notice", "stop", "continue"]
"""What `LocalProvider.inject` plays into a VM."""

log = logging.getLogger("makara.manager")

_CONSOLE_BYTES = 8 << 10
_GPUS = "gpus.json"
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
        self._ending = threading.RLock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._notices: dict[str, threading.Timer] = {}
        self._capacity: int | None = None
        self._closed = False
        folder.mkdir(parents=True, exist_ok=True)
        for vm in self._vms():
            if self._record(vm) == _ENDED:
                _clear(folder / vm)  # files that could not be removed before, or are of an earlier version
        self._adopt()
        self._resume_notices()

    # ---- the provider's contract ---------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        """Create a VM; one that has ended is not created again by any attempt."""
        directory = self._folder / boot.vm
        with self._lock:
            if (directory / RECORD).exists():
                if self._status(boot.vm) is ResourceStatus.GONE:
                    raise Ended(f"local VM {boot.vm} has ended")
                return boot.vm
            if self._capacity is not None and self._num_running() >= self._capacity:
                raise NoCapacity(f"no local VM to be had now: {self._capacity} may live at a time")
            try:
                gpus = self._gpus_for(boot)
                write_private(directory / "boot.json", boot.model_dump_json().encode())
                write_private(directory / _GPUS, json.dumps(gpus).encode())
                self._spawn(boot.vm, directory, gpus)
            except OSError as error:
                raise NotAllowed(f"cannot start local VM {boot.vm}: {error}") from error
        return boot.vm

    def release(self, vm: str, attempts: int = 1) -> bool:
        timer = self._notices.pop(vm, None)
        if timer is not None:
            timer.cancel()
        self._processes(vm).end()
        self._remember_end(vm)
        return True

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        return [resource for resource in self.list() if resource.vm == vm]

    def list(self) -> Sequence[Resource]:
        with self._lock:  # never between the start of a VM and its record
            return [Resource(vm=vm, attempt=1, id=vm, status=self._status(vm)) for vm in self._vms()]

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return []

    def offers(self, resources: Resources) -> Sequence[Offer]:
        """This machine, at no cost."""
        price = Price(hourly=0.0, ceiling=0.0, at=time.time(), source="this machine")
        return [Offer(placement=Placement(provider="local", market=Market.ON_DEMAND), price=price)]

    def console(self, vm: str, attempts: int = 1) -> str:
        try:
            return (self._folder / vm / "agent.log").read_bytes()[-_CONSOLE_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def capacity(self) -> int | None:
        return self._capacity

    def set_capacity(self, vms: int | None) -> None:
        """Set how many VMs may live at a time (None: any number). Living VMs stay."""
        self._capacity = vms

    # ---- faults --------------------------------------------------------------------------------------------

    def inject(self, vm: str, kind: FaultKind, deadline_s: float = 0.0) -> None:
        """Inject a fault, for the demo and tests. `kill`: kill the whole VM at once. `notice`: announce a
        kill `deadline_s` from now, then kill. `stop`/`continue`: suspend and resume its trainers (SIGSTOP,
        SIGCONT). Raises `ProviderError`."""
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
            self._processes(vm).signal_trainers(number)

    def close(self) -> None:
        """Cancel timers and let no watcher write any more; VMs live on."""
        with self._ending:
            self._closed = True
        for timer in self._notices.values():
            timer.cancel()

    # ---- processes -----------------------------------------------------------------------------------------

    def _spawn(self, vm: str, directory: Path, gpus: Sequence[str]) -> None:
        shown = {VISIBLE: ",".join(gpus)} if gpus else {}
        child = self._processes(vm).start([*self._command, str(directory / "boot.json")], shown)
        self._children[vm] = child
        self._remember_start(vm, child.pid)
        threading.Thread(target=self._watch, args=(vm, child), name=f"watch {vm}", daemon=True).start()

    def _gpus_for(self, boot: BootConfig) -> list[str]:
        """One for each trainer, those first that the fewest living VMs have; none if there are too few."""
        gpus = shown_gpus() if boot.device_kind != "cpu" else []
        if len(gpus) < boot.num_devices:
            return []  # the agent says what is wrong, if anything is
        taken = Counter(gpu for vm in self._living() for gpu in self._gpus_of(vm))
        return sorted(gpus, key=lambda gpu: taken[gpu])[: boot.num_devices]

    def _gpus_of(self, vm: str) -> list[str]:
        try:
            return json.loads((self._folder / vm / _GPUS).read_bytes())
        except FileNotFoundError:  # of an earlier version, whose VMs all took the first ones
            return shown_gpus()[:1]

    def _watch(self, vm: str, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        with self._ending:
            if self._closed:
                return
            self._status(vm)
        self._changed()

    def _adopt(self) -> None:
        """Record VMs that an earlier manager started but did not record."""
        for path in self._folder.glob("*/boot.json"):
            vm = path.parent.name
            if self._record(vm) is None:
                leader = self._processes(vm).unrecorded_leader()
                if leader is not None:
                    self._remember_start(vm, leader)

    def _status(self, vm: str) -> ResourceStatus:
        if self._processes(vm).leader() is not None:
            return ResourceStatus.RUNNING
        if self._record(vm) != _ENDED:
            self._kill(vm)  # a VM without its agent has ended: no trainer may remain
            self._remember_end(vm)
        return ResourceStatus.GONE

    def _vms(self) -> list[str]:
        """All VMs ever started here, including ended ones."""
        return [path.parent.name for path in self._folder.glob(f"*/{RECORD}")]

    def _num_running(self) -> int:
        return len(self._living())

    def _living(self) -> list[str]:
        return [vm for vm in self._vms() if self._processes(vm).leader() is not None]

    def _processes(self, vm: str) -> VmProcesses:
        return VmProcesses(vm, self._folder / vm)

    def _record(self, vm: str) -> dict[str, Any] | None:
        return self._processes(vm).recorded()

    def _remember_start(self, vm: str, pid: int) -> None:
        write_private(self._folder / vm / RECORD, record(pid))

    def _remember_end(self, vm: str) -> None:
        """Record the end, so that its processes are not looked for and a repeated request has no effect."""
        directory = self._folder / vm
        with self._ending:  # called by its watcher and by a release, perhaps at once
            if directory.is_dir() and self._record(vm) != _ENDED:
                write_private(directory / RECORD, json.dumps(_ENDED).encode())
                _clear(directory)

    def _kill(self, vm: str) -> None:
        self._processes(vm).kill()

    # ---- notices -------------------------------------------------------------------------------------------

    def _kill_later(self, vm: str, delay_s: float) -> None:
        timer = threading.Timer(delay_s, self._kill, (vm,))
        timer.daemon = True
        self._notices[vm] = timer
        timer.start()

    def _resume_notices(self) -> None:
        for path in self._folder.glob("*/notice.json"):
            notice = NoticeFile.model_validate_json(path.read_bytes())
            if self._processes(path.parent.name).leader() is not None:
                passed_s = max(0.0, time.time() - notice.written_at)  # the wall clock may have been set
                self._kill_later(path.parent.name, max(0.0, notice.deadline_s - passed_s))


def _clear(directory: Path) -> None:
    """Remove an ended VM's files except logs."""
    for path in directory.iterdir():
        if path.name == RECORD or path.match("*.log") or path.match("*.log.1"):
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                wipe(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:  # a process that was just killed may still use it
            log.warning("VM folder %s: %s is left behind: %s", directory, path.name, error)
