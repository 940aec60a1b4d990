"""The market: who comes and goes when, and who is announced. A pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from makara.manager.replay.markets import Market, trace_of
from makara.simulator import NodeChange, TraceEvent

NODES = 8
WINDOW_S = 240.0
NOTICE_S = 10.0
SEED = 5703
"""One of few whose events are seven seconds and more apart, and whose nodes are up before they go: so what is
compared are policies, not which of two events comes first."""
_NOTICED = 0.4  # of the removals
_HURRIED = Market(
    about="an hour's changes in minutes", losses_per_hour=180.0, group=1.3, away_hours=40.0 / 3600
)


@dataclass(frozen=True)
class Spot:
    """A market: times of `events` count from when the job trains on the first nodes, which come at 0."""

    events: Sequence[TraceEvent]
    noticed: frozenset[str]
    """The nodes whose removal the cloud announces."""
    notice_s: float = NOTICE_S

    @cached_property
    def first(self) -> list[str]:
        """The nodes that are there at first."""
        return [event.node for event in self.events if event.time_ms == 0]

    @cached_property
    def later(self) -> list[TraceEvent]:
        return [event for event in self.events if event.time_ms > 0]

    def delayed(self, delay_ms: int) -> list[TraceEvent]:
        """The events, all but the first nodes' coming so much later."""
        return [replace(it, time_ms=it.time_ms + delay_ms if it.time_ms else 0) for it in self.events]


def spot(seed: int = SEED, *, window_s: float = WINDOW_S) -> Spot:
    """The market of the benchmark."""
    events = trace_of(_HURRIED, seed=seed, nodes=NODES, hours=window_s / 3600)
    chance = random.Random(f"notices/{seed}")
    removed = [event.node for event in events if event.change is NodeChange.REMOVE]
    return Spot(events, frozenset(node for node in removed if chance.random() < _NOTICED))
