"""The pool of joined machines: their keys, their leases, and which are connected.

Machines and leases are in a small SQLite file and outlive the manager. Connections and last reports are only
in memory, since machines repeat them on the next connection.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ...protocol.machines import Lease, MachineOrders, MachineReport
from ...protocol.messages import BootConfig
from ..spec.frozen import Frozen
from .nonces import Nonces

_KEPT_S = 3600.0  # how long ended leases are listed
_AWAY_S = 300.0


Send = Callable[[MachineOrders | None], None]
"""Sends on one connection, from any thread; None: the machine was removed, so close the connection."""


class Stage(StrEnum):
    """The stage of a lease."""

    GIVEN = "given"  # the machine has not reported yet that the agent runs
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Leased:
    """One VM on one machine. Its row is never deleted, so that the VM is never created again."""

    name: str
    vm: str
    attempt: int
    machine: str
    stage: Stage
    changed_at: float
    boot: str | None  # until the machine has it


class MachineState(Frozen):
    """One machine, as the API shows it; times in Unix seconds. `vm`: the VM that it runs (None: none, or one
    of another user). It is free if it is not `leased`, is connected, `unwiped` (why files of an ended VM
    could not be removed) is empty, and it is not `leaving` (`makara join` was told to end)."""

    machine: str
    name: str
    joined_at: float
    seen_at: float
    connected: bool
    vm: str | None
    leased: bool
    unwiped: str
    leaving: bool
    num_cpus: int
    memory_bytes: int


@dataclass
class _Line:
    """A connection: how to send on it, the last orders sent, and the last report."""

    send: Send
    version: int = 0
    report: MachineReport | None = None


class MachinePool:
    """Safe to use from several threads. `wall` gives Unix seconds, `steady` monotonic seconds.

    A machine that is away for `away_s` loses its lease; when it comes back, it is told to wipe it.
    """

    def __init__(
        self,
        path: Path,
        *,
        away_s: float = _AWAY_S,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nonces = Nonces(steady)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._away_s = away_s
        self._wall = wall
        self._steady = steady
        self._lock = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._consoles: dict[str, str] = {}
        self._started_at = steady()
        self._left_at: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}  # when this manager's connections closed
        # While a manager gives way to the next one both write, and on a busy disk one may wait for long.
        self._database = sqlite3.connect(path, timeout=60, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)
        self._leases = {row[0]: _leased(row) for row in self._database.execute(_RECENT)}

    def close(self) -> None:
        with self._lock:
            self._lines.clear()
            self._database.close()

    # ---- machines ------------------------------------------------------------------------------------------

    def knows(self, machine: str) -> bool:
        with self._lock:
            return self._database.execute(_KNOWN, (machine,)).fetchone() is not None

    def admit(self, machine: str, public_key: bytes) -> None:
        now = self._wall()
        with self._lock:
            self._database.execute(_ADMIT, (machine, public_key.hex(), now, now))

    def remove(self, machine: str) -> bool:
        """Remove a machine and its lease; returns whether it existed. It needs a join token to come back."""
        with self._lock:
            line = self._lines.pop(machine, None)
            if line is not None:
                line.send(None)
            for lease in self._held():
                if lease.machine == machine:
                    self._become(lease, Stage.GONE)
            return self._database.execute("DELETE FROM machines WHERE machine = ?", (machine,)).rowcount > 0

    def connect(self, machine: str, send: Send) -> None:
        """Register a connection; replaces an earlier one. A machine removed meanwhile is disconnected."""
        with self._lock:
            if not self.knows(machine):
                send(None)
                return
            self._lines[machine] = _Line(send)
            self._left_at.pop(machine, None)
            self._tell(machine)

    def disconnect(self, machine: str, send: Send) -> None:
        with self._lock:
            line = self._lines.get(machine)
            if line is not None and line.send == send:
                del self._lines[machine]
                self._left_at[machine] = self._steady()
                self._seen_at[machine] = self._wall()
                lease = self._lease_of(machine)
                if lease is not None and line.report is not None and _has_left(line.report):
                    self._become(lease, Stage.GONE)  # the machine has not heard of it, and never will

    def take(self, machine: str, report: MachineReport, send: Send) -> bool:
        """Take in a machine's report; False if this is no longer its connection."""
        with self._lock:
            line = self._lines.get(machine)
            if line is None or line.send != send:
                return False
            line.report = report
            about = (report.name, report.num_cpus, report.memory_bytes, self._wall(), machine)
            self._database.execute(_SEEN, about)
            lease = self._lease_of(machine)
            if lease is not None:
                self._compare(lease, report, line)
            return True

    def machines(self) -> list[MachineState]:
        """All machines, in the order in which they joined."""
        with self._lock:
            self._give_up_lost()
            found: list[MachineState] = []
            for machine, name, cpus, memory, joined, seen in self._database.execute(_MACHINES):
                lease, line = self._lease_of(machine), self._lines.get(machine)
                connected = line is not None
                left: float | None = self._seen_at.get(machine)
                found.append(
                    MachineState(
                        machine=machine,
                        name=name,
                        num_cpus=cpus,
                        memory_bytes=memory,
                        joined_at=joined,
                        seen_at=self._wall() if connected else seen if left is None else left,
                        connected=connected,
                        vm=lease.vm if lease is not None else None,
                        leased=lease is not None,
                        unwiped=line.report.unwiped if line is not None and line.report is not None else "",
                        leaving=line is not None and line.report is not None and line.report.leaving,
                    )
                )
            return found

    # ---- leases --------------------------------------------------------------------------------------------

    def lease(self, name: str, vm: str, attempt: int, boot: BootConfig) -> Leased | None:
        """Lease a free machine to this attempt, or return its existing lease; None if none is free."""
        with self._lock:
            found = self.find(name)
            if found is not None:
                return found
            machine = self._free()
            if machine is None:
                return None
            made = Leased(name, vm, attempt, machine, Stage.GIVEN, self._wall(), boot.model_dump_json())
            self._store(made)
            self._tell(machine)
            return made

    def find(self, name: str) -> Leased | None:
        with self._lock:
            self._give_up_lost()
            if name in self._leases:
                return self._leases[name]
            row = self._database.execute(f"{_LEASES} WHERE name = ?", (name,)).fetchone()
            return _leased(row) if row is not None else None

    def release(self, vm: str) -> bool:
        """End the leases of this VM; returns whether they have ended."""
        with self._lock:
            self._give_up_lost()
            for lease in self._held():
                if lease.vm == vm and lease.stage is not Stage.ENDING:
                    self._become(lease, Stage.ENDING)
                    self._tell(lease.machine)
            return not any(lease.vm == vm for lease in self._held())

    def leases(self) -> list[Leased]:
        """All current leases, and those that ended recently."""
        with self._lock:
            self._give_up_lost()
            since = self._wall() - _KEPT_S
            for lease in list(self._leases.values()):
                if lease.stage is Stage.GONE and lease.changed_at < since:
                    del self._leases[lease.name]
                    self._consoles.pop(lease.name, None)
            return list(self._leases.values())

    def num_machines(self) -> int:
        """How many machines run a VM, or could: those that are connected and are not to leave, and those that
        are leased."""
        with self._lock:
            usable = {
                machine
                for machine, line in self._lines.items()
                if line.report is not None and _stays(line.report)
            }
            return len(usable | {lease.machine for lease in self._held()})

    def console(self, vm: str) -> str:
        with self._lock:
            names = [lease.name for lease in self._leases.values() if lease.vm == vm]
            return next((self._consoles[name] for name in reversed(names) if name in self._consoles), "")

    # ---- inside --------------------------------------------------------------------------------------------

    def _compare(self, lease: Leased, report: MachineReport, line: _Line) -> None:
        if report.lease == lease.name:
            if report.console:
                self._consoles[lease.name] = report.console
            if lease.stage is Stage.GIVEN:
                self._become(lease, Stage.RUNNING)
            return
        cannot_begin = lease.stage is Stage.ENDING or bool(report.unwiped) or report.leaving
        never_began = cannot_begin and report.obeyed == line.version
        if report.ended == lease.name or lease.stage is Stage.RUNNING or never_began:
            self._become(lease, Stage.GONE)

    def _free(self) -> str | None:
        """The connected machine that has been without a lease for longest."""
        busy = {lease.machine for lease in self._held()}
        free = [
            machine
            for machine, line in self._lines.items()
            if machine not in busy and line.report is not None and _is_free(line.report)
        ]
        last: dict[str, float] = dict(self._database.execute(_LAST_LEASED).fetchall())
        return min(free, key=lambda machine: (last.get(machine, 0.0), machine), default=None)

    def _held(self) -> list[Leased]:
        return [lease for lease in self._leases.values() if lease.stage is not Stage.GONE]

    def _lease_of(self, machine: str) -> Leased | None:
        return next((lease for lease in self._held() if lease.machine == machine), None)

    def _give_up_lost(self) -> None:
        """End the leases of machines that have been away for too long."""
        now = self._steady()
        for lease in self._held():
            if lease.machine in self._lines:
                continue
            if now - self._left_at.get(lease.machine, self._started_at) >= self._away_s:
                self._become(lease, Stage.GONE)

    def _become(self, lease: Leased, stage: Stage) -> None:
        kept = lease.boot if stage is Stage.GIVEN else None  # it holds a secret: keep it only while needed
        self._store(replace(lease, stage=stage, changed_at=self._wall(), boot=kept))
        if stage is Stage.GONE and lease.machine in self._lines:
            self._tell(lease.machine)

    def _store(self, lease: Leased) -> None:
        stage = lease.stage.value
        row = (lease.name, lease.vm, lease.attempt, lease.machine, stage, lease.changed_at, lease.boot)
        self._database.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._leases[lease.name] = lease

    def _tell(self, machine: str) -> None:
        """Send the machine its complete orders."""
        line = self._lines.get(machine)
        if line is None:
            return
        lease = self._lease_of(machine)
        wanted = None
        if lease is not None and lease.stage is not Stage.ENDING:
            boot = BootConfig.model_validate_json(lease.boot) if lease.boot is not None else None
            wanted = Lease(name=lease.name, vm=lease.vm, boot=boot)
        line.version += 1
        line.send(MachineOrders(version=line.version, lease=wanted))


def _is_free(report: MachineReport) -> bool:
    return report.lease is None and _stays(report)


def _stays(report: MachineReport) -> bool:
    return not report.unwiped and not report.leaving


def _has_left(report: MachineReport) -> bool:
    return report.lease is None and report.leaving


def _leased(row: tuple[str, str, int, str, str, float, str | None]) -> Leased:
    return Leased(row[0], row[1], row[2], row[3], Stage(row[4]), row[5], row[6])


_TABLES = """
CREATE TABLE IF NOT EXISTS machines (
    machine TEXT PRIMARY KEY, public_key TEXT NOT NULL, name TEXT NOT NULL DEFAULT '',
    num_cpus INTEGER NOT NULL DEFAULT 0, memory_bytes INTEGER NOT NULL DEFAULT 0,
    joined REAL NOT NULL, seen REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS leases (
    name TEXT PRIMARY KEY, vm TEXT NOT NULL, attempt INTEGER NOT NULL, machine TEXT NOT NULL,
    stage TEXT NOT NULL, changed REAL NOT NULL, boot TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS leases_of_machines ON leases (machine, changed);
CREATE INDEX IF NOT EXISTS leases_by_stage ON leases (stage);
"""
_LEASES = "SELECT name, vm, attempt, machine, stage, changed, boot FROM leases"
_RECENT = f"{_LEASES} WHERE stage != 'gone' ORDER BY changed"
_KNOWN = "SELECT 1 FROM machines WHERE machine = ?"
_ADMIT = "INSERT OR IGNORE INTO machines (machine, public_key, joined, seen) VALUES (?, ?, ?, ?)"
_SEEN = "UPDATE machines SET name = ?, num_cpus = ?, memory_bytes = ?, seen = ? WHERE machine = ?"
_MACHINES = (
    "SELECT machine, name, num_cpus, memory_bytes, joined, seen FROM machines ORDER BY joined, machine"
)
_LAST_LEASED = "SELECT machine, MAX(changed) FROM leases GROUP BY machine"
