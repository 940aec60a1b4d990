"""The manager in a simulated world: the real core, in virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..core import Decision, Observations, Timing, decide
from ..core.commands import Command
from ..core.events import Event
from ..core.state import JobState
from .clock import Clock
from .store import Store

Content = TypeVar("Content")


class World(ABC, Generic[Content]):
    """One job's core, its clock and its store. A subclass says what the world does with commands and orders;
    what may go wrong around them it does in `keep` and `handle`.
    """

    def __init__(self, timing: Timing, epoch_s: float) -> None:
        self.timing = timing
        self.clock = Clock(epoch_s)
        self.state, self.observations = JobState(), Observations()
        self.store: Store[Content] = Store()
        self.num_decisions = 0

    @property
    def now_ns(self) -> int:
        """Since the world began."""
        return self.clock.now_ns

    @property
    def now(self) -> float:
        """The core's clock, in seconds."""
        return self.clock.now

    def at(self, at_ns: int, call: Callable[..., None], *values: Any) -> None:
        self.clock.at(at_ns, call, *values)

    def after(self, delay_s: float, call: Callable[..., None], *values: Any) -> None:
        self.clock.after(delay_s, call, *values)

    def handle(self, event: Event) -> None:
        """One decision, and what it brings about."""
        decision = decide(self.state, self.observations, event, self.timing)
        self.num_decisions += 1
        changed = decision.state is not self.state
        self.keep(decision)
        for command in decision.commands:
            self.perform(command)
        if changed:
            self.give_orders()

    def keep(self, decision: Decision) -> None:
        """From now on it has been decided."""
        self.state, self.observations = decision.state, decision.observations

    @abstractmethod
    def perform(self, command: Command) -> None:
        """Run a command, or have it run later; its results come back as events."""

    @abstractmethod
    def give_orders(self) -> None:
        """The state has changed, and with it what agents and trainers are told."""
