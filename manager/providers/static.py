"""Machines that users joined (`makara join`), each leased to one VM at a time.

A VM is a lease with a new name; ending it wipes the job's folder on the machine and returns the machine to
the pool. No machine is ever powered off.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...protocol.messages import BootConfig, NoticeSource
from ..spec.placement import Attempt, Market, Offer, Placement, Price
from ..spec.resources import Resources
from . import Ended, NoCapacity, Resource, ResourceStatus
from .pool import Leased, MachinePool, Stage

_STATUS = {
    Stage.GIVEN: ResourceStatus.PENDING,
    Stage.RUNNING: ResourceStatus.RUNNING,
    Stage.ENDING: ResourceStatus.ENDING,
    Stage.GONE: ResourceStatus.GONE,
}


class StaticProvider:
    """The machines of `pool`."""

    def __init__(self, pool: MachinePool) -> None:
        self.pool = pool

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        # `makara join` writes the notice file when it is told to end.
        boot = boot.model_copy(update={"notices": NoticeSource(kind="file")})
        lease = self.pool.lease(attempt.name, attempt.vm, attempt.number, boot)
        if lease is None:
            raise NoCapacity(f"no machine is free: {self._told()}")
        if lease.stage in (Stage.ENDING, Stage.GONE):
            raise Ended(f"{attempt.name} has ended on machine {lease.machine}")
        return _resource(lease).id

    def release(self, vm: str, attempts: int = 1) -> bool:
        return self.pool.release(vm)

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        return [resource for resource in self.list() if resource.vm == vm]

    def list(self) -> Sequence[Resource]:
        return [_resource(lease) for lease in self.pool.leases()]

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        """No faults: machines may still join while the job waits."""
        return []

    def offers(self, resources: Resources) -> Sequence[Offer]:
        """Any machine, at no cost: its owner pays for it anyway."""
        price = Price(hourly=0.0, ceiling=0.0, at=time.time(), source="your own machines")
        return [Offer(placement=Placement(provider="static", market=Market.ON_DEMAND), price=price)]

    def capacity(self) -> int | None:
        return self.pool.num_machines()

    def console(self, vm: str, attempts: int = 1) -> str:
        return self.pool.console(vm)

    def close(self) -> None:
        self.pool.close()

    def _told(self) -> str:
        machines = self.pool.machines()
        if not machines:
            return "none has joined; see `makara join`"
        leased = sum(machine.vm is not None for machine in machines)
        away = sum(not machine.connected for machine in machines)
        unwiped = sum(bool(machine.unwiped) for machine in machines)
        left = f", and {unwiped} cannot be wiped (`makara machines`)" if unwiped else ""
        return f"of {len(machines)} that joined, {leased} are leased and {away} are not connected{left}"


def _resource(lease: Leased) -> Resource:
    return Resource(
        vm=lease.vm,
        attempt=lease.attempt,
        id=f"{lease.machine}/{lease.name}",
        status=_STATUS[lease.stage],
    )
