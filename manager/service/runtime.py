"""What a manager holds in memory of one job: the fold of its facts, and what was observed since."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from ...morphing import Infeasible
from ...protocol.messages import Orders, Report, StepMetrics
from ..core import Vitals
from ..core.events import ConnectionClosed, ReportReceived, VmTerminated
from ..core.orders import OrderParts
from ..core.state import JobState
from .journal import StoredFact
from .quarantine import Quarantine, fold_readable
from .ranking import Ranking

RECENT_STEPS = 20


class Connection(Protocol):
    """An agent's connection, as the service sees it."""

    def push(self, orders: Orders) -> None:
        """Have these orders sent; newer ones replace them if they were not sent yet."""
        ...

    def replaced(self) -> None:
        """A newer connection of the same VM has taken its place."""
        ...


Observation = ReportReceived | ConnectionClosed | VmTerminated


class Gathered(NamedTuple):
    """What was observed of a job and waits to be decided on together."""

    events: list[Observation]
    decided: asyncio.Future[None]


class Job:
    """One job. Belongs to the manager's event loop; `lock` is held while an event is decided on."""

    def __init__(self, job: str, facts: list[StoredFact], metrics: list[StepMetrics]) -> None:
        self.job = job
        self.state: JobState
        self.quarantine: Quarantine | None
        self.state, self.quarantine = fold_readable(facts)
        self.failures = 0  # to decide about it, in a row
        self.failed_at = 0.0
        self.sequence = facts[-1].sequence if facts else 0
        self.vitals = Vitals()
        self.reports: dict[str, Report] = {}
        self.not_understood: dict[str, str] = {}  # VM -> why what its agent says cannot be read
        self.connections: dict[str, Connection] = {}
        self.told: dict[str, Orders] = {}  # by VM, what its connection was sent last
        self.parts = OrderParts()
        self.recent: deque[StepMetrics] = deque(metrics, RECENT_STEPS)
        self.first_steps: dict[int, float] = {}  # generation -> when its first step was reported
        self.lock = asyncio.Lock()
        self.gathered: Gathered | None = None
        self.beats: dict[str, ReportReceived] = {}  # by VM, since the last decision on what was observed
        self.spent_s = 0.0  # on the event loop, by the newest decision
        self.rests_until = 0.0  # what is observed before is gathered; monotonic seconds
        self.next_tick = 0.0  # likewise
        self.dirty = False  # something to show changed since the last snapshot
        self.ranking: tuple[Hashable, Ranking | Infeasible] | None = None  # the last one shown, and of what
        self.ranking_lock = asyncio.Lock()

    @property
    def submitted(self) -> bool:
        """Durably; that is known also of one whose submission cannot be read."""
        return self.state.spec is not None or self.quarantine is not None

    @property
    def active(self) -> bool:
        return self.submitted and self.state.ended is None

    @property
    def set_aside(self) -> bool:
        return self.quarantine is not None and self.state.ended is None

    def may_own(self, vm: str) -> bool:
        """Whether a VM of this name may be one of those that facts which cannot be read are about."""
        hidden = self.active and self.quarantine is not None and not self.quarantine.readable
        return hidden and vm.startswith(f"{self.job}-vm")

    def has_use_of(self, vm: str) -> bool:
        """Whether what this VM reports matters: it lives, as far as is known."""
        return vm in self.state.vms.live or self.may_own(vm)

    def new_vms(self) -> tuple[str, ...]:
        """Names that no VM of the job ever had, as many as it could want."""
        spec, known = self.state.spec, len(self.state.vms)
        most = spec.resources.max_nodes if spec is not None else 0
        return tuple(f"{self.job}-vm{known + n}" for n in range(most))

    def add_steps(self, metrics: list[StepMetrics], now: float) -> list[StepMetrics]:
        """Those of the steps that are new: two agents tell of each, and repeat it until acknowledged."""
        new: list[StepMetrics] = []
        for step in metrics:
            last = self.recent[-1] if self.recent else None
            if last is None or (step.generation, step.step) > (last.generation, last.step):
                if last is None or step.generation > last.generation:
                    self.first_steps[step.generation] = now
                self.recent.append(step)
                new.append(step)
        return new
