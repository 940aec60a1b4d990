"""The VM that this machine currently runs: an agent in a folder of its own, which is wiped afterwards.

`<folder>/vms/<lease>/` holds the boot file (mode 0600), the agent's log, the job's code, and the files that
it writes. Blocking; safe to use from several threads.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ...protocol.machines import CONSOLE_BYTES, Lease, MachineOrders, MachineReport
from ...protocol.messages import BootConfig, NoticeFile
from ...protocol.vm_processes import RECORD, VmProcesses, record
from ...protocol.wiping import wipe
from ..agent.notices.file import NOTICE_FILE
from ..agent.shown_token import write_secret

log = logging.getLogger("makara.machine")
AGENT = (sys.executable, "-P", "-m", "makara.worker.agent")
_LEASE = "lease.json"
_WIPE_AGAIN_S = 10.0
_UNWIPED_CHARACTERS = 500  # of the reason, for the manager


class LeasedVm:
    """At most one VM. After a restart of this process it finds the agent that still runs."""

    def __init__(
        self,
        folder: Path,
        *,
        url: str,
        ca: str | None = None,
        address: str | None = None,
        command: Sequence[str] = AGENT,
    ) -> None:
        """`url`, `ca`: the manager's address from this machine and the trusted authority; they override the
        boot file. `address`: where the agent listens for its peers; None: as the boot file says."""
        self._folder = folder / "vms"
        self._url = url
        self._ca = ca
        self.address = address
        self._command = command
        self._lock = threading.RLock()
        self._leaving = False
        self._ended: str | None = None
        self._lease: Lease | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._unwiped: dict[Path, str] = {}  # {folder of an ended VM: why it still exists}
        self._wipe_at = 0.0
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._find()

    def obey(self, orders: MachineOrders | None) -> MachineReport:
        """Carry out the orders and report. None: no orders yet.

        While files of an ended VM remain, no other VM is started, since it may be another user's.
        """
        with self._lock:
            return self._obey(orders)

    def leave(self, grace_s: float) -> str | None:
        """Start no other VM from now on; give the current one, if any, `grace_s` to hand over.

        Returns its name.
        """
        with self._lock:
            self._leaving = True
            if self._lease is None:
                return None
            if grace_s > 0:
                self._give_notice(self._lease, grace_s)
            return self._lease.vm

    def end(self) -> None:
        """End the VM, if there is one."""
        with self._lock:
            if self._lease is not None:
                self._end(self._lease)

    def _obey(self, orders: MachineOrders | None) -> MachineReport:
        if self._lease is not None and (not self._runs() or _differs(orders, self._lease)):
            self._end(self._lease)
        wanted = orders.lease if orders is not None else None
        is_new = wanted is not None and wanted.name != self._ended and self._lease is None
        if self._unwiped and time.monotonic() >= self._wipe_at:
            self._wipe(*self._unwiped)
        may_start = is_new and not self._unwiped and not self._leaving
        if wanted is not None and wanted.boot is not None and may_start:
            self._begin(wanted, wanted.boot)
        return MachineReport(
            obeyed=orders.version if orders is not None else 0,
            lease=self._lease.name if self._lease is not None else None,
            ended=self._ended,
            console=self._console(),
            unwiped="; ".join(self._unwiped.values())[:_UNWIPED_CHARACTERS],
            leaving=self._leaving,
        )

    def _begin(self, lease: Lease, boot: BootConfig) -> None:
        """Start the VM; if that fails, it has ended."""
        try:
            self._start(lease, boot)
        except OSError as error:  # a full disk, too many processes
            log.error("VM %s cannot be started: %s", lease.vm, error)
            self._end(lease)

    def _start(self, lease: Lease, boot: BootConfig) -> None:
        place = self._folder / lease.name
        place.mkdir(mode=0o700)
        changes = {"directory": str(place), "manager_url": self._url, "ca": self._ca}
        if self.address is not None:
            changes["address"] = self.address
        boot = boot.model_copy(update=changes)
        write_secret(place / _LEASE, lease.model_copy(update={"boot": None}).model_dump_json())
        write_secret(place / "boot.json", boot.model_dump_json())
        child = VmProcesses(lease.vm, place).start([*self._command, str(place / "boot.json")])
        write_secret(place / RECORD, record(child.pid).decode())
        self._children.append(child)
        self._lease = lease
        log.info("this machine is VM %s", lease.vm)

    def _give_notice(self, lease: Lease, grace_s: float) -> None:
        notice = NoticeFile(deadline_s=grace_s, written_at=time.time())
        try:
            write_secret(self._folder / lease.name / NOTICE_FILE, notice.model_dump_json())
        except OSError as error:  # a full disk: it ends without
            log.error("VM %s cannot be given notice: %s", lease.vm, error)

    def _end(self, lease: Lease) -> None:
        place = self._folder / lease.name
        VmProcesses(lease.vm, place).end()
        self._children = [child for child in self._children if child.poll() is None]
        self._lease, self._ended = None, lease.name
        log.info("this machine is no longer VM %s", lease.vm)
        self._wipe(place)

    def _wipe(self, *places: Path) -> None:
        for place in places:
            try:
                if place.exists():  # a person may have removed it
                    wipe(place)
                log.info("%s is wiped", place)
                self._unwiped.pop(place, None)
            except OSError as error:
                if place not in self._unwiped:
                    log.error("%s cannot be wiped, and is tried again: %s", place, error)
                self._unwiped[place] = str(error)
        self._wipe_at = time.monotonic() + _WIPE_AGAIN_S

    def _runs(self) -> bool:
        assert self._lease is not None
        return VmProcesses(self._lease.vm, self._folder / self._lease.name).leader() is not None

    def _find(self) -> None:
        """Take over an agent that an earlier process started; wipe leftovers of others.

        A notice that the earlier process gave when it was told to end is withdrawn.
        """
        for place in self._folder.iterdir():
            if not (place / _LEASE).exists():
                self._wipe(place)  # nothing runs in it
                continue
            lease = Lease.model_validate_json((place / _LEASE).read_bytes())
            processes = VmProcesses(lease.vm, place)
            leader = processes.unrecorded_leader() if processes.recorded() is None else None
            if leader is not None:
                write_secret(place / RECORD, record(leader).decode())
            if self._lease is None and processes.leader() is not None:
                self._lease = lease
                (place / NOTICE_FILE).unlink(missing_ok=True)
            else:
                self._end_found(lease)

    def _end_found(self, lease: Lease) -> None:
        kept = self._lease
        self._end(lease)
        self._lease = kept

    def _console(self) -> str:
        if self._lease is None:
            return ""
        try:
            data = (self._folder / self._lease.name / "agent.log").read_bytes()
        except FileNotFoundError:
            return ""
        return data[-CONSOLE_BYTES // 4 :].decode(errors="replace")


def _differs(orders: MachineOrders | None, lease: Lease) -> bool:
    """Whether the orders name another lease than this; without orders, this one continues."""
    return orders is not None and (orders.lease is None or orders.lease.name != lease.name)
