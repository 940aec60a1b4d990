"""Two clouds as they are known to behave, seen from outside: what is true, and what they say.

They lie as EC2 and Azure are documented to, or were seen to: lists lag behind creations and ends; a call
fails though it was carried out, or takes minutes; capacity, quotas and rates are refused; VMs never boot;
they are taken back with notice and without; a deletion fails, takes long, or leaves disks and interfaces.
EC2 knows a token for ever and Azure a name only while something has it. `honest`: nothing of this any more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from makara.manager.providers import ResourceStatus
from makara.manager.spec.placement import Attempt, Market, Placement

LAG_S = 120.0  # at most, of lists behind a creation
ON_DEMAND_PRICES = {"small": 1.0, "large": 2.5, "Standard_S": 1.2}
ZONES = {"aws": ("a", "b"), "azure": ("1", "2")}
LEAST_BILLED_S = 60.0


@dataclass(eq=False)
class Machine:
    """A VM that was ever created."""

    attempt: Attempt
    id: str
    made_at: float
    seen_from: float  # lists have it for certain from then on
    price: float  # USD an hour, now
    on_demand: float  # what the same costs on demand
    joins_at: float | None
    status: ResourceStatus = ResourceStatus.PENDING
    ends_at: float | None = None  # once it is ending
    gone_at: float | None = None
    stale_until: float = 0.0  # lists show it as it was until then
    parts: set[str] = field(default_factory=set)  # that stay when it is gone
    notice_at: float | None = None  # when it is taken, as the cloud has said
    failed: bool = False  # its creation has
    taken_back: bool = False  # the cloud itself ended it
    off: bool = False  # it has shut itself down, and is billed
    paid: float = 0.0  # USD
    paid_until: float = 0.0

    @property
    def there(self) -> bool:
        return self.gone_at is None


@dataclass
class Habits:
    """How often, of one, a cloud does what while it lies."""

    no_capacity: float = 0.0
    quota: float = 0.0
    not_allowed: float = 0.0  # a creation, whatever came of it before
    throttled: float = 0.0
    lost_done: float = 0.0  # the answer is lost, what was asked for is done
    lost_undone: float = 0.0
    lost_late: float = 0.0  # the answer is lost, and a creation takes effect only then
    slow: float = 0.0  # the answer takes minutes
    fails_late: float = 0.0  # a creation is accepted, and fails minutes later
    never_joins: float = 0.0
    evicted: float = 0.0  # a VM, within an hour of its creation
    evicted_early: float = 0.0  # ... about as soon as it could join
    release_fails: float = 0.0
    release_slow: float = 0.0
    parts_stay: float = 0.0
    list_fails: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Habits:
        def odds(most: float) -> float:
            return rng.choice((0.0, rng.uniform(0.0, most)))

        return cls(
            no_capacity=odds(0.6),
            quota=odds(0.2),
            not_allowed=odds(0.05),
            throttled=odds(0.5),
            lost_done=odds(0.5),
            lost_undone=odds(0.3),
            lost_late=odds(0.3),
            slow=odds(0.5),
            fails_late=odds(0.4),
            never_joins=odds(0.3),
            evicted=odds(1.0),
            release_fails=odds(0.6),
            release_slow=odds(0.5),
            parts_stay=odds(0.6),
            list_fails=odds(0.3),
        )


class LyingCloud:
    """What there is at all clouds, in truth. `changed` is called after each change of what is billed."""

    def __init__(
        self,
        seed: int | str,
        *,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], object],
        habits: Habits | None = None,
        changed: Callable[[], None] = lambda: None,
        made: Callable[[Machine], None] = lambda _: None,
        ending: Callable[[Machine], None] = lambda _: None,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = clock
        self.after = after
        self.habits = habits or Habits()
        self.changed = changed
        self.made = made
        self.ending = ending
        self.lies = True
        self.lists_lag = True
        self.broken_places: set[tuple[str, str]] = set()  # (provider, zone): each creation has no answer
        self.machines: list[Machine] = []
        self.prices: dict[Placement, float] = {}
        self.refused: set[str] = set()  # attempts that are to be refused, once each
        self.num_calls = 0  # that create or release
        self.looks: Counter[str] = Counter()  # by provider
        self.lists: Counter[str] = Counter()
        self.trouble: tuple[int, str] | None = None  # which of these calls suffers which of the `Habits`

    def odds(self, odds: float) -> bool:
        return self.lies and self.rng.random() < odds

    def does(self, habit: str) -> bool:
        """Whether this call suffers that."""
        return self.trouble == (self.num_calls, habit) or self.odds(getattr(self.habits, habit))

    # ---- what is true --------------------------------------------------------------------------------------

    def billed(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.there and not machine.failed]

    def left(self) -> list[str]:
        """Whatever exists, billed or not."""
        return [f"{m.id} {m.attempt.name} {m.status}, {m.parts}" for m in self.machines if m.there or m.parts]

    def spent(self) -> float:
        """USD, to this moment."""
        for machine in self.machines:
            self._pay(machine)
        return sum(machine.paid for machine in self.machines)

    def hourly(self) -> float:
        return sum(machine.price for machine in self.billed())

    def _pay(self, machine: Machine) -> None:
        if machine.failed:
            return
        until = machine.gone_at if machine.gone_at is not None else self.clock()
        until = max(until, machine.made_at + LEAST_BILLED_S if not machine.there else 0.0)
        machine.paid += max(0.0, until - machine.paid_until) * machine.price / 3600.0
        machine.paid_until = max(until, machine.paid_until)

    # ---- what happens --------------------------------------------------------------------------------------

    def price_of(self, placement: Placement) -> float:
        """Now, an hour: a spot price is never above that on demand (EC2's and Azure's documentation)."""
        on_demand = ON_DEMAND_PRICES[placement.instance_type]
        if placement.market is Market.ON_DEMAND:
            return on_demand
        return self.prices.setdefault(placement, on_demand * self.rng.uniform(0.3, 0.8))

    def make(self, attempt: Attempt) -> Machine:
        """It exists, and is billed, from now on."""
        now, rng, place = self.clock(), self.rng, attempt.placement
        joins = not self.odds(self.habits.never_joins)
        machine = Machine(
            attempt=attempt,
            id=f"{place.provider}-{len(self.machines)}",
            made_at=now,
            seen_from=now + (rng.uniform(0.0, LAG_S) if self._lags() and rng.random() < 0.5 else 0.0),
            price=self.price_of(place),
            on_demand=ON_DEMAND_PRICES[place.instance_type],
            joins_at=now + rng.uniform(30.0, 150.0) if joins else None,
            paid_until=now,
        )
        self.machines.append(machine)
        if place.market is Market.SPOT and self.odds(self.habits.evicted):
            self.after(rng.uniform(5.0, 3600.0), lambda: self.evict(machine))
        elif place.market is Market.SPOT and self.odds(self.habits.evicted_early):
            self.after(rng.uniform(20.0, 160.0), lambda: self.evict(machine))
        self.changed()
        self.made(machine)
        return machine

    def _lags(self) -> bool:
        return self.lies and self.lists_lag

    def evict(self, machine: Machine) -> None:
        """The cloud takes a spot VM back: with notice if it runs, and at times without."""
        if not self.lies or machine.status not in (ResourceStatus.PENDING, ResourceStatus.RUNNING):
            return
        machine.taken_back = True
        if machine.status is ResourceStatus.RUNNING and self.rng.random() < 0.5:
            machine.notice_at = self.clock() + (
                120.0 if machine.attempt.placement.provider == "aws" else 30.0
            )
            self.after(machine.notice_at - self.clock(), lambda: self.end(machine))
        else:
            self.end(machine)

    def end(self, machine: Machine) -> None:
        """It begins to end."""
        if machine.status in (ResourceStatus.ENDING, ResourceStatus.GONE):
            return
        rng, now = self.rng, self.clock()
        slow = self.odds(self.habits.release_slow)
        takes_s = rng.uniform(60.0, 300.0) if slow else rng.uniform(0.5, 30.0)
        machine.status, machine.ends_at = ResourceStatus.ENDING, now + takes_s
        machine.stale_until = now + (rng.uniform(0.0, 60.0) if self._lags() else 0.0)
        self.after(takes_s, lambda: self._gone(machine))
        self.ending(machine)

    def _gone(self, machine: Machine) -> None:
        machine.gone_at, machine.status = self.clock(), ResourceStatus.GONE
        if self.odds(self.habits.parts_stay):
            machine.parts |= (
                {"disk", "interface"} if machine.attempt.placement.provider == "azure" else {"disk"}
            )
        self._pay(machine)
        self.changed()

    def fail(self, machine: Machine) -> None:
        """Its creation fails, and what was made for it stays (Azure)."""
        if machine.there and machine.status is ResourceStatus.PENDING:
            machine.failed, machine.status = True, ResourceStatus.ENDING
            machine.parts |= {"disk", "interface"}

    def be_honest(self) -> None:
        """From now on, and cheap."""
        self.lies = False
        self.move_prices(0.5)

    def move_prices(self, most: float = 1.0) -> None:
        """Spot prices change; who bid less than one of them loses the VM."""
        for placement in self.prices:
            self.prices[placement] = ON_DEMAND_PRICES[placement.instance_type] * self.rng.uniform(0.3, most)
        for machine in self.billed():
            place, bid = machine.attempt.placement, machine.attempt.max_price
            if place.market is not Market.SPOT:
                continue
            self._pay(machine)
            if bid is not None and self.price_of(place) > bid:
                self.end(machine)
            else:
                machine.price = self.price_of(place)
        self.changed()

    def at(self, provider: str) -> Iterator[Machine]:
        return (machine for machine in self.machines if machine.attempt.placement.provider == provider)
