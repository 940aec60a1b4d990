"""A job in a manager's memory: the fold of its facts, and observations since the manager started."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from ...morphing import Infeasible
from ...protocol.messages import Orders, Report, StepMetrics
from ..core import Observations
from ..core.events import ConnectionClosed, ReportReceived, VmTerminated
from ..core.orders import OrderParts
from ..core.pools.shares import Share
from ..core.state import JobState
from ..core.strikes.ledger import Ledger
from .believed_steps import Pace
from .journal import StoredFact
from .planning.ranking import Ranking
from .quarantine import Quarantine, fold_readable

RECENT_STEPS = 20


class Connection(Protocol):
    """The service's view of an agent's connection."""

    def push(self, orders: Orders) -> None:
        """Send these orders; newer ones replace them if they were not sent yet."""
        ...

    def replaced(self) -> None:
        """Called when a newer connection of the same VM has replaced this one."""
        ...


Observation = ReportReceived | ConnectionClosed | VmTerminated


class Gathered(NamedTuple):
    """Observations of a job that wait to be decided on together."""

    events: list[Observation]
    decided: asyncio.Future[None]


class FirstStep(NamedTuple):
    """The first step of a generation. `since_last_s`: since the step before it, of another generation, whose
    steps after its first one took `before_s` each (median); None where that is not known, or steps were lost
    between."""

    at: float
    since_last_s: float | None = None
    before_s: float | None = None


class Job:
    """One job. Belongs to the manager's event loop; `lock` is held while an event is decided on."""

    def __init__(self, job: str, facts: list[StoredFact], metrics: list[StepMetrics]) -> None:
        self.job = job
        self.state: JobState
        self.quarantine: Quarantine | None
        self.state, self.quarantine = fold_readable(facts)
        self.strikes = Ledger()  # decisions that failed
        self.sequence = facts[-1].sequence if facts else 0
        self.observations = Observations()
        self.share = Share()  # of pools of VMs that other jobs want, too
        self.reports: dict[str, Report] = {}
        self.not_understood: dict[str, str] = {}  # {VM: why its agent's messages cannot be read}
        self.connections: dict[str, Connection] = {}
        self.told: dict[str, Orders] = {}  # by VM, the last orders sent
        self.parts = OrderParts()
        self.recent: deque[StepMetrics] = deque(metrics, RECENT_STEPS)
        self.pace = Pace(metrics[-1].step if metrics else 0)
        self.first_steps: dict[int, FirstStep] = {}  # by generation
        self._last_step_at: float | None = None  # when the newest step was reported
        self.lock = asyncio.Lock()
        self.gathered: Gathered | None = None
        self.beats: dict[str, ReportReceived] = {}  # by VM, since the last decision on observations
        self.spent_s = 0.0  # time on the event loop of the newest decision
        self.rests_until = 0.0  # observations are gathered until then; monotonic seconds
        self.next_tick = 0.0  # monotonic seconds
        self.dirty = False  # whether views changed since the last snapshot
        # The ranking shown last, with what a death costs the plan that ran then; and what they depend on.
        self.ranking: tuple[Hashable, tuple[Ranking | Infeasible, str]] | None = None
        self.ranking_lock = asyncio.Lock()

    @property
    def submitted(self) -> bool:
        """Whether the job is durably submitted; also true if its submission cannot be read."""
        return self.state.spec is not None or self.quarantine is not None

    def is_shown_to(self, owner: str | None) -> bool:
        """Whether it exists for this user (None: an administrator). A job whose submission cannot be read is
        the administrators'."""
        return self.submitted and owner in (None, self.state.owner)

    @property
    def active(self) -> bool:
        return self.submitted and self.state.ended is None

    @property
    def set_aside(self) -> bool:
        return self.quarantine is not None and self.state.ended is None

    def may_own(self, vm: str) -> bool:
        """Whether a VM of this name may belong to this job by facts that cannot be read."""
        hidden = self.active and self.quarantine is not None and not self.quarantine.readable
        return hidden and vm.startswith(f"{self.job}-vm")

    def has_use_of(self, vm: str) -> bool:
        """Whether this VM's reports matter: it lives, as far as is known."""
        return vm in self.state.vms.live or self.may_own(vm)

    def new_vms(self) -> tuple[str, ...]:
        """Unused VM names, as many as the job could need."""
        spec, known = self.state.spec, len(self.state.vms)
        most = spec.resources.max_nodes if spec is not None else 0
        return tuple(f"{self.job}-vm{known + n}" for n in range(most))

    def add_steps(self, metrics: list[StepMetrics], now: float) -> list[StepMetrics]:
        """Add and return the new steps: two agents report each step, and repeat it until acknowledged."""
        new: list[StepMetrics] = []
        for step in metrics:
            last = self.recent[-1] if self.recent else None
            if last is None or (step.generation, step.step) > (last.generation, last.step):
                if last is None or step.generation > last.generation:
                    self.first_steps[step.generation] = self._first_step(step, now)
                self.recent.append(step)
                self._last_step_at = now
                new.append(step)
        return new

    def _first_step(self, step: StepMetrics, now: float) -> FirstStep:
        if not self.recent or self._last_step_at is None or step.step != self.recent[-1].step + 1:
            return FirstStep(now)
        before = [row.seconds for row in self.recent if row.generation == self.recent[-1].generation]
        undisturbed = before[1:]  # the first may be a rest, or have run twice
        before_s = statistics.median(undisturbed) if undisturbed else None
        return FirstStep(now, now - self._last_step_at, before_s)
