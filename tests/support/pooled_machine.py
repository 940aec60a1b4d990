"""A machine of a pool, without a connection between: what `makara join` runs, in this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from makara.manager.providers.pool import MachinePool
from makara.protocol.machines import MachineOrders
from makara.protocol.vm_processes import VmProcesses
from makara.worker.machine.leased import LeasedVm

URL = "http://127.0.0.1:1"


class PooledMachine:
    """Obeys its pool in a thread of its own. Its VMs say `console` and do nothing."""

    def __init__(self, folder: Path, console: str = "") -> None:
        self.folder = folder
        self.id = folder.name
        program = f"import time; print({console!r}, flush=True); time.sleep(600)"
        self._command = (sys.executable, "-S", "-c", program)
        self._lock = threading.RLock()
        self._pool: MachinePool | None = None
        self._orders: MachineOrders | None = None
        self._deaf = False
        self._earlier: list[LeasedVm] = []  # processes before: their children are this process's, too
        self.leased = self._started()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def vm(self) -> str | None:
        """Whose agent runs on it."""
        with self._lock:
            name = self.leased.obey(None).lease
        return name.rpartition("-")[0] if name is not None else None

    @property
    def places(self) -> list[str]:
        """The folders of its VMs."""
        return sorted(path.name for path in (self.folder / "vms").iterdir())

    def join(self, pool: MachinePool) -> None:
        self.leave()
        with self._lock:
            pool.admit(self.id, b"")
            self._pool = pool
            pool.connect(self.id, self._take)
        self.settle()

    def leave(self) -> None:
        """Lose the connection."""
        with self._lock:
            if self._pool is not None:
                self._pool.disconnect(self.id, self._take)
            self._pool = self._orders = None

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Nothing that arrives is looked at meanwhile."""
        with self._lock:
            self._deaf = True
            yield
            self._deaf = False

    def go(self) -> None:
        """As `makara join` does when it has been told to end twice: the VM ends, and the manager hears so."""
        with self._lock:
            self.leased.leave(0.0)
            self.leased.end()
        self.settle()
        self.leave()

    def restart(self) -> None:
        """As if `makara join` was killed and run again: it knows only what its folder says."""
        self.leave()
        with self._lock:
            self._earlier.append(self.leased)
            self.leased = self._started()

    def kill(self) -> None:
        """SIGKILL to the VM; it is dead then."""
        with self._lock:
            name = self.leased.obey(None).lease
            assert name is not None
            VmProcesses(name.rpartition("-")[0], self.folder / "vms" / name).kill()
            self._wait_for_children()

    def settle(self) -> None:
        """Obey, and tell, until nothing is left to do."""
        for _ in range(3):
            self._step()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self.leave()
        self.leased.obey(MachineOrders(version=0))
        self._wait_for_children()

    def _wait_for_children(self) -> None:
        for leased in (*self._earlier, self.leased):
            for child in leased._children:
                child.wait()

    def _started(self) -> LeasedVm:
        return LeasedVm(self.folder, url=URL, command=self._command)

    def _take(self, orders: MachineOrders | None) -> None:
        self._orders = orders

    def _work(self) -> None:
        while not self._closed.wait(0.02):
            self._step()

    def _step(self) -> None:
        with self._lock:
            if self._pool is not None and not self._deaf:
                self._pool.take(self.id, self.leased.obey(self._orders), self._take)
