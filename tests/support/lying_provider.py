"""A manager's provider at a lying cloud: what a process of it knows, and what it is told.

As `AwsProvider` does, that of EC2 asks by id for what this process made and by tag for everything else, and
believes no list for five minutes after it was opened. As `AzureProvider` does, that of Azure asks by name for
the attempts that it knows of, or for the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lying_cloud import ON_DEMAND_PRICES, ZONES, LyingCloud, Machine
from makara.manager.providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    ProviderError,
    QuotaExceeded,
    Resource,
    ResourceStatus,
    Throttled,
)
from makara.manager.spec.job_spec import Resources
from makara.manager.spec.placement import Attempt, Market, Offer, Placement, Price
from makara.protocol.messages import BootConfig

_MEMORY_S = 300.0
_GONE = (ResourceStatus.GONE, ResourceStatus.ENDING)
_SHOWN_S = 3600.0  # EC2 shows a VM for so long that has ended


class Later(BaseException):
    """The answer comes so much later, and is made then. No error: nobody between catches it."""

    def __init__(self, after_s: float, answer: Callable[[], object]) -> None:
        super().__init__()
        self.after_s = after_s
        self.answer = answer


class LyingProvider:
    """One process's. Calls take effect at once; how long they are on their way is the caller's."""

    def __init__(self, name: str, cloud: LyingCloud) -> None:
        self.name = name
        self._cloud = cloud
        self._opened_at = cloud.clock()
        self._unknown: dict[
            str, float
        ] = {}  # VM -> when a creation was last tried whose outcome is not known
        self._mine: set[str] = set()  # ids of what this process was told that it made
        self._newest: dict[str, int] = {}

    # ---- creating ------------------------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        self._newest[attempt.vm] = max(attempt.number, self._newest.get(attempt.vm, 0))
        unknown = self._unknown.get(attempt.vm)
        self._unknown[attempt.vm] = self._cloud.clock()
        try:
            identity = self._create(attempt)
        except (NoCapacity, NotAllowed, QuotaExceeded, Throttled):
            if unknown is None:
                del self._unknown[attempt.vm]
            else:
                self._unknown[attempt.vm] = unknown
            raise
        return self._made(attempt, identity)

    def _create(self, attempt: Attempt) -> str:
        cloud = self._cloud
        cloud.num_calls += 1
        if cloud.does("throttled"):
            raise Throttled("RequestLimitExceeded")
        if cloud.does("not_allowed"):
            raise NotAllowed("UnauthorizedOperation")
        broken = (self.name, attempt.placement.zone) in cloud.broken_places
        if broken or cloud.does("lost_undone"):
            raise ProviderError("connection reset")
        if cloud.does("lost_late"):
            cloud.after(cloud.rng.uniform(1.0, 30.0), lambda: self._take_effect(attempt))
            raise ProviderError("timed out")
        known = self._known(attempt)
        if known is None:
            if attempt.name in cloud.refused:
                cloud.refused.discard(attempt.name)
                raise NoCapacity("none there")
            if cloud.does("no_capacity") or self._is_above_bid(attempt):
                raise NoCapacity(f"no capacity for {attempt.placement.instance_type}")
            if cloud.does("quota"):
                raise QuotaExceeded("over quota")
            known = cloud.make(attempt)
            if self.name == "azure" and cloud.does("fails_late"):
                self._fail_late(known)
        elif known.failed:
            return self._clean(known)
        elif known.status in _GONE:
            raise Ended(f"{known.id} has ended")
        if cloud.does("lost_done"):
            raise ProviderError("read timed out")
        if cloud.does("slow"):
            raise Later(cloud.rng.uniform(30.0, 300.0), lambda: self._made(attempt, known.id))
        return known.id

    def _take_effect(self, attempt: Attempt) -> None:
        """A call whose caller waits no more."""
        known = self._known(attempt)
        forgotten = known is not None and self.name == "azure" and not known.there and not known.parts
        if (known is None or forgotten) and not self._is_above_bid(attempt):
            self._cloud.make(attempt)

    def _is_above_bid(self, attempt: Attempt) -> bool:
        return attempt.max_price is not None and self._cloud.price_of(attempt.placement) > attempt.max_price

    def _known(self, attempt: Attempt) -> Machine | None:
        """What there is, or was, of this very attempt: by token at EC2, by name at Azure."""
        same = [m for m in self._cloud.at(self.name) if m.attempt.name == attempt.name]
        if self.name == "aws":
            same = [machine for machine in same if machine.attempt.placement.zone == attempt.placement.zone]
        else:
            same = [m for m in same if m.there or m.parts or m.id in self._mine]
        return same[-1] if same else None

    def _made(self, attempt: Attempt, identity: str) -> str:
        self._mine.add(identity)
        self._unknown.pop(attempt.vm, None)
        return identity

    def _fail_late(self, machine: Machine) -> None:
        cloud = self._cloud
        after_s = cloud.rng.uniform(20.0, 120.0)
        cloud.after(after_s, lambda: cloud.fail(machine))
        raise Later(after_s + 1.0, lambda: self._clean(machine) if machine.failed else machine.id)

    def _clean(self, machine: Machine) -> str:
        """What a failed creation left is deleted before the failure is told."""
        machine.gone_at, machine.status = self._cloud.clock(), ResourceStatus.GONE
        machine.parts.clear()
        raise NoCapacity("AllocationFailed")

    # ---- releasing and finding -----------------------------------------------------------------------------

    def release(self, vm: str, attempts: int = 1) -> bool:
        cloud = self._cloud
        cloud.num_calls += 1
        if cloud.does("throttled"):
            raise Throttled("RequestLimitExceeded")
        if cloud.does("release_fails"):
            raise ProviderError("503")
        found = [
            machine for machine in cloud.at(self.name) if machine.attempt.vm == vm and self._finds(machine)
        ]
        done = True
        for machine in found:
            if machine.failed:
                machine.gone_at, machine.status = cloud.clock(), ResourceStatus.GONE
            if machine.there:
                cloud.end(machine)
                done = False
            elif machine.parts:
                machine.parts.pop()
                done = False
        if cloud.does("lost_done"):
            raise ProviderError("read timed out")
        if not done:
            return False
        if not found and self.name == "aws" and self._may_appear(vm):
            return False
        self._unknown.pop(vm, None)
        return True

    def _may_appear(self, vm: str) -> bool:
        tried = max(self._opened_at, self._unknown.get(vm, 0.0))
        return self._cloud.clock() - tried < _MEMORY_S

    def _finds(self, machine: Machine) -> bool:
        """Whether it is found when its VM is asked for."""
        if self.name == "azure":
            known = self._newest.get(machine.attempt.vm) or self._newest_listed(machine.attempt.vm) or 3
            return (machine.there or bool(machine.parts)) and machine.attempt.number <= known
        return machine.id in self._mine or self._is_listed(machine)

    def _newest_listed(self, vm: str) -> int:
        listed = [m for m in self._cloud.at(self.name) if m.attempt.vm == vm and self._is_listed(m)]
        return max((machine.attempt.number for machine in listed), default=0)

    def _is_listed(self, machine: Machine) -> bool:
        cloud = self._cloud
        if cloud.clock() < machine.seen_from and cloud.rng.random() < 0.7:
            return False
        if machine.there or machine.parts:
            return True
        shown_s = _SHOWN_S if self.name == "aws" else 0.0
        return machine.gone_at is not None and cloud.clock() < max(
            machine.gone_at + shown_s, machine.stale_until
        )

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        self._cloud.looks[self.name] += 1
        if self._cloud.does("list_fails"):
            raise ProviderError("503")
        machines = [machine for machine in self._cloud.at(self.name) if machine.attempt.vm == vm]
        return [r for machine in machines if self._finds(machine) for r in self._resources(machine, True)]

    def list(self) -> Sequence[Resource]:
        self._cloud.lists[self.name] += 1
        if self._cloud.does("list_fails"):
            raise ProviderError("503")
        machines = [machine for machine in self._cloud.at(self.name) if self._is_listed(machine)]
        for machine in machines:
            number = max(machine.attempt.number, self._newest.get(machine.attempt.vm, 0))
            self._newest[machine.attempt.vm] = number
        return [resource for machine in machines for resource in self._resources(machine, False)]

    def _resources(self, machine: Machine, exact: bool) -> list[Resource]:
        stale = not exact and self._cloud.clock() < machine.stale_until
        status = ResourceStatus.RUNNING if stale else machine.status
        shows_power = exact or self.name == "aws"  # Azure's list does not tell what a VM is doing
        if machine.off and shows_power and status is ResourceStatus.RUNNING:
            status = ResourceStatus.ENDING
        vm, number = machine.attempt.vm, machine.attempt.number
        ran_s = None
        if self.name == "aws" and machine.gone_at is not None:
            ran_s = machine.gone_at - machine.made_at
        found = [
            Resource(
                vm=vm,
                attempt=number,
                id=machine.id,
                status=status,
                shows_power=shows_power,
                taken_back=self._why(machine),
                ran_s=ran_s if status is ResourceStatus.GONE else None,
            )
        ]
        for part in sorted(machine.parts):
            kind = "disk" if part == "disk" else "interface"
            identity, ending = f"{machine.id}-{part}", ResourceStatus.ENDING
            found.append(Resource(vm=vm, attempt=number, id=identity, status=ending, kind=kind))
        return found

    def _why(self, machine: Machine) -> str:
        """Azure only tells that it deletes a VM, not why, and forgets it then."""
        if not machine.taken_back or machine.status not in _GONE:
            return ""
        return "Server.SpotInstanceTermination" if self.name == "aws" else "Azure is deleting it"

    # ---- the rest ------------------------------------------------------------------------------------------

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return []

    def offers(self, resources: Resources) -> Sequence[Offer]:
        if self._cloud.does("list_fails"):
            raise ProviderError("503")
        found: list[Offer] = []
        for market in (Market.SPOT, Market.ON_DEMAND):
            for kind in resources.types_of(self.name):
                for zone in resources.zones_of(self.name) or ZONES[self.name]:
                    place = Placement(
                        provider=self.name, market=market, region="r", zone=zone, instance_type=kind
                    )
                    found.append(Offer(placement=place, price=self._price(place, resources)))
        return found

    def _price(self, place: Placement, resources: Resources) -> Price:
        ceiling = ON_DEMAND_PRICES[place.instance_type]
        if place.market is Market.SPOT and resources.max_price is not None:
            ceiling = min(ceiling, resources.max_price)
        hourly = min(self._cloud.price_of(place), ceiling)
        return Price(hourly=hourly, ceiling=ceiling, at=self._cloud.clock(), source="a test")

    def console(self, vm: str, attempts: int = 1) -> str:
        """What it writes of itself for as long as it is there."""
        machines = [machine for machine in self._cloud.at(self.name) if machine.attempt.vm == vm]
        return "\n".join(f"{machine.id} is {machine.status}" for machine in machines if machine.there)

    def close(self) -> None:
        pass
