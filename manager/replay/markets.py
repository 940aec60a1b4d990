"""Made-up spot markets: pure functions of a name, a seed, a number of nodes and a time.

Losses of nodes come as a Poisson process, in some markets in waves. Each takes one node or a group of
geometrically distributed size, of one zone where the market has zones. What was lost comes back, as other
nodes, after an exponentially distributed time. No number is measured.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from ...simulator import NodeChange, TraceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What a market is like. Times in hours but where the name says seconds."""

    about: str
    losses_per_hour: float
    """Of nodes, alone or in a group, for 16 nodes; more nodes are lost as much more often."""
    group: float = 1.0
    """Nodes that a loss takes, on average."""
    zones: int = 1
    """Nodes come in turn from so many zones; a loss takes nodes of one."""
    away_hours: float = 0.5
    """Until what was lost is there again, on average; infinite: never."""
    present: float = 1.0
    """The part of the nodes that is there at first; the others come as if they had been lost."""
    wave: float = 0.0
    """By how much of itself the rate of losses rises and falls, in waves of `wave_hours`."""
    wave_hours: float = 6.0
    notice_s: float = 0.0
    """How long before a removal the cloud says so."""
    boot_s: float = 60.0
    """From a node's coming until its agent joins."""


_RARE, _SOME, _MANY = 0.3, 2.0, 8.0
_INFINITE = math.inf

MARKETS = {
    "calm": Market(about="a loss in three hours", losses_per_hour=_RARE),
    "calm-groups": Market(about="as calm, in groups", losses_per_hour=_RARE, group=3.0),
    "calm-notice": Market(about="as calm, with notice", losses_per_hour=_RARE, notice_s=120.0),
    "calm-scarce": Market(about="as calm, and few nodes", losses_per_hour=_RARE, present=0.5, away_hours=8.0),
    "changing": Market(about="two losses an hour", losses_per_hour=_SOME),
    "changing-groups": Market(about="in groups", losses_per_hour=_SOME, group=3.0),
    "changing-zones": Market(about="in groups of one zone", losses_per_hour=_SOME, group=3.0, zones=4),
    "changing-notice": Market(about="with notice", losses_per_hour=_SOME, notice_s=120.0),
    "changing-short-notice": Market(about="with short notice", losses_per_hour=_SOME, notice_s=30.0),
    "changing-scarce": Market(
        about="what is lost stays away long", losses_per_hour=_SOME, present=0.7, away_hours=3.0
    ),
    "stormy": Market(about="eight losses an hour", losses_per_hour=_MANY),
    "stormy-groups": Market(about="in groups", losses_per_hour=_MANY, group=2.5),
    "stormy-zones": Market(about="in groups of one zone", losses_per_hour=_MANY, group=2.5, zones=3),
    "stormy-notice": Market(about="with notice", losses_per_hour=_MANY, notice_s=120.0),
    "stormy-groups-notice": Market(
        about="in groups, with short notice", losses_per_hour=_MANY, group=2.5, notice_s=30.0
    ),
    "stormy-scarce": Market(
        about="what is lost stays away long", losses_per_hour=_MANY, present=0.7, away_hours=1.0
    ),
    "waves": Market(about="losses come in waves", losses_per_hour=_SOME, wave=0.9),
    "waves-groups": Market(about="waves of groups", losses_per_hour=_SOME, wave=0.9, group=3.0),
    "waves-notice": Market(about="waves, with notice", losses_per_hour=_SOME, wave=0.9, notice_s=120.0),
    "slow-joins": Market(about="nodes take ten minutes to join", losses_per_hour=_SOME, boot_s=600.0),
    "flapping": Market(about="what is lost is soon back", losses_per_hour=_MANY, away_hours=0.05),
    "shrinking": Market(about="what is lost never comes back", losses_per_hour=1.0, away_hours=_INFINITE),
    "growing": Market(
        about="few at first, more and more", losses_per_hour=_RARE, present=0.5, away_hours=1.5
    ),
    "bursts": Market(about="rare losses of many at once", losses_per_hour=0.5, group=6.0),
}


def trace_of(market: Market, *, seed: int, nodes: int, hours: float) -> tuple[TraceEvent, ...]:
    """The market's events, in the order of their times. The same arguments always give the same events."""
    draw = random.Random(f"{seed}/{market}")
    first = max(1, round(market.present * nodes))
    live = list(range(first))
    events = [TraceEvent(0, NodeChange.ADD, _name(market, number)) for number in live]
    back: list[float] = []
    named, now = first, 0.0
    for _ in range(nodes - first):
        _goes(back, market, draw, now)
    most_per_hour = market.losses_per_hour * nodes / 16 * (1 + market.wave)
    loss = draw.expovariate(most_per_hour)
    while min(loss, *back[:1], math.inf) < hours:
        if back and back[0] <= loss:
            now = heapq.heappop(back)
            live.append(named)
            events.append(TraceEvent(_ms(now), NodeChange.ADD, _name(market, named)))
            named += 1
            continue
        now, loss = loss, loss + draw.expovariate(most_per_hour)
        if draw.random() * (1 + market.wave) > 1 + market.wave * math.sin(
            2 * math.pi * now / market.wave_hours
        ):
            continue
        for number in _lost(market, live, draw):
            live.remove(number)
            events.append(TraceEvent(_ms(now), NodeChange.REMOVE, _name(market, number)))
            _goes(back, market, draw, now)
    return tuple(events)


def _lost(market: Market, live: list[int], draw: random.Random) -> list[int]:
    """The nodes that a loss takes."""
    if not live:
        return []
    zone = draw.choice(live) % market.zones
    there = [number for number in live if number % market.zones == zone]
    size = 1
    while size < len(there) and draw.random() < 1 - 1 / market.group:
        size += 1
    return draw.sample(there, size)


def _goes(back: list[float], market: Market, draw: random.Random, now: float) -> None:
    """Another node comes in place of one that goes now."""
    away = draw.expovariate(1.0)
    if math.isfinite(market.away_hours):
        heapq.heappush(back, now + away * market.away_hours)


def _name(market: Market, number: int) -> str:
    return f"zone{number % market.zones}-node{number}" if market.zones > 1 else f"node{number}"


def _ms(hours: float) -> int:
    return round(hours * 3_600_000)
