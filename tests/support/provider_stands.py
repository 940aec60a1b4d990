"""What the conformance suite needs of each provider: an account of its own, and ways to trouble it.

A stand joins by being in STANDS. What a kind of provider cannot suffer is not among its `troubles`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

import psutil
from aws_stand import AwsStand, aws_stand
from azure_stand import AzureStand, azure_stand
from makara.manager.providers import Provider
from makara.manager.providers.local import LocalProvider
from makara.manager.providers.pool import MachinePool
from makara.manager.providers.static import StaticProvider
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import BootConfig
from pooled_machine import PooledMachine
from provider_troubles import CONSOLE, Trouble


class Stand(Protocol):
    """One account in a cloud, as nobody but the cloud itself sees it."""

    troubles: ClassVar[frozenset[Trouble]]
    counts_attempts: ClassVar[bool]  # a VM may have several attempts
    remembers_ends: ClassVar[bool]  # a new manager can learn that an attempt's VM is gone

    def provider(self, manager: str = "first") -> Provider:
        """That of a manager that has just been started."""
        ...

    def attempt(self, vm: str, number: int = 1) -> Attempt: ...

    def resources(self, **changes: object) -> Resources:
        """The part of a job file that asks for these VMs."""
        ...

    def trouble(self, trouble: Trouble) -> None: ...

    def relieve(self, trouble: Trouble) -> None: ...

    def end(self, vm: str) -> None:
        """The cloud takes the VM back, and everything that belongs to it."""
        ...

    def wait(self) -> None:
        """Time passes, until lists tell what there is and what is ending has ended."""
        ...

    def billed(self) -> list[str]:
        """The VM of each thing in the account that costs money; empty for one without its tags."""
        ...


class LocalStand:
    """This machine, where each VM is a process."""

    troubles = frozenset({Trouble.NO_CAPACITY, Trouble.REFUSED})
    counts_attempts = False
    remembers_ends = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._managers: dict[str, list[LocalProvider]] = {}
        self._command = (
            sys.executable,
            "-S",
            "-c",
            f"import time; print({CONSOLE!r}, flush=True); time.sleep(600)",
        )

    def provider(self, manager: str = "first") -> Provider:
        earlier = self._managers.setdefault(manager, [])
        for provider in earlier:
            provider.close()
        earlier.append(LocalProvider(self._folder / manager / "vms", command=self._command))
        return earlier[-1]

    def attempt(self, vm: str, number: int = 1) -> Attempt:
        return Attempt(vm=vm, number=number, placement=Placement(provider="local"))

    def resources(self, **changes: object) -> Resources:
        return Resources.model_validate({"provider": "local", "max_nodes": 2, **changes})

    def trouble(self, trouble: Trouble) -> None:
        for provider in self._newest():
            if trouble is Trouble.NO_CAPACITY:
                provider.set_capacity(0)
            else:
                provider._command = (str(self._folder / "no such program"),)

    def relieve(self, trouble: Trouble) -> None:
        for provider in self._newest():
            if trouble is Trouble.NO_CAPACITY:
                provider.set_capacity(None)
            else:
                provider._command = self._command

    def end(self, vm: str) -> None:
        next(p for p in self._newest() if vm in {r.vm for r in p.list()}).inject(vm, "kill")
        while set(self.billed()) & {vm}:
            time.sleep(0.01)

    def wait(self) -> None:
        pass

    def billed(self) -> list[str]:
        found: list[str] = []
        for path in self._folder.glob("*/vms/*/vm.json"):
            pid = json.loads(path.read_bytes()).get("pid")
            if pid is not None and _lives(pid):
                found.append(path.parent.name)
        return found

    def close(self) -> None:
        for provider in self._newest():
            for resource in provider.list():
                provider.release(resource.vm)
            provider.close()

    def _newest(self) -> Iterator[LocalProvider]:
        return (providers[-1] for providers in self._managers.values())


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def local_stand(folder: Path) -> Iterator[Stand]:
    stand = LocalStand(folder)
    try:
        yield stand
    finally:
        stand.close()


class StaticStand:
    """Six machines for each manager, on this one."""

    troubles = frozenset({Trouble.NO_CAPACITY})
    counts_attempts = True
    remembers_ends = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: dict[str, list[PooledMachine]] = {}
        self._providers: dict[str, StaticProvider] = {}

    def provider(self, manager: str = "first") -> Provider:
        folder = self._folder / manager
        if manager not in self._machines:
            self._machines[manager] = [PooledMachine(folder / f"machine{n}", CONSOLE) for n in range(6)]
        pool = MachinePool(folder / "machines.sqlite3")
        for machine in self._machines[manager]:
            machine.join(pool)
        if manager in self._providers:
            self._providers[manager].close()
        self._providers[manager] = StaticProvider(pool)
        return self._providers[manager]

    def attempt(self, vm: str, number: int = 1) -> Attempt:
        return Attempt(vm=vm, number=number, placement=Placement(provider="static"))

    def resources(self, **changes: object) -> Resources:
        return Resources.model_validate({"provider": "static", "max_nodes": 2, **changes})

    def trouble(self, trouble: Trouble) -> None:
        for machine in self._all():
            machine.leave()

    def relieve(self, trouble: Trouble) -> None:
        for manager, machines in self._machines.items():
            for machine in machines:
                machine.join(self._providers[manager].pool)

    def end(self, vm: str) -> None:
        self.wait()
        for machine in self._all():
            if machine.vm == vm:
                machine.kill()

    def wait(self) -> None:
        for machine in self._all():
            machine.settle()

    def billed(self) -> list[str]:
        self.wait()
        return [machine.vm for machine in self._all() if machine.vm is not None]

    def close(self) -> None:
        for machine in self._all():
            machine.close()
        for provider in self._providers.values():
            provider.close()

    def _all(self) -> list[PooledMachine]:
        return [machine for machines in self._machines.values() for machine in machines]


@contextmanager
def static_stand(folder: Path) -> Iterator[Stand]:
    stand = StaticStand(folder)
    try:
        yield stand
    finally:
        stand.close()


STANDS: dict[str, tuple[type[Stand], Callable[[Path], AbstractContextManager[Stand]]]] = {
    "local": (LocalStand, local_stand),
    "static": (StaticStand, static_stand),
    "aws": (AwsStand, aws_stand),
    "azure": (AzureStand, azure_stand),
}


def boot_of(attempt: Attempt, folder: Path) -> BootConfig:
    return BootConfig(
        vm=attempt.vm,
        job="job",
        manager_url="https://192.0.2.1:8700",
        join_token=f"secret of {attempt.name}",
        directory=str(folder / attempt.vm),
    )
