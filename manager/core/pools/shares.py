"""How the VMs of a pool are shared among the jobs that ask for them there.

A *pool* is where VMs come from that several jobs may want: the machines of one's own that joined, local VMs,
and of a cloud one instance type in one zone, spot or on demand. Jobs queue for a pool by priority, then by
submission, and keep their place whatever happens to their VMs.

* A job that trains keeps `min_nodes`.
* A job that waits is given `min_nodes` where as many are free, or would be if jobs of its priority or a lower
  one had no more than `min_nodes`: these then give up what they have above that.
* The first for which that is not so is the head of the pool. It may hold what is free; those after it may
  hold nothing there, so that it is not overtaken for ever.
* One that asks for more than its pools can ever have is passed over.
* What is left is for jobs that train: first what they have, then more.

How many VMs a cloud has is known only when it refuses one to a job that waits: then it has those that are
held or being handed over, until some of these are free: then the job asks again before more are handed over.
While it is refused there, or holds too few, jobs that train do not ask for more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pydantic import Field

from ...spec.frozen import Frozen
from ...spec.placement import Placement
from ...spec.resources import CLOUDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a job has and wants. `held`: its VMs by pool, joined or asked for, without those that it gives up.

    `leaving`: those that it gives up and still has. `trains`: as many as `least` have joined. `refused`: the
    pools of clouds that have none for it, and since when.
    `is_active` False: it asks for no more, and what it has is soon free: it waits for a person, or ends.
    """

    job: str
    priority: int
    submitted_at: float
    least: int
    most: int
    is_min: bool = True  # `least` is `min_nodes`; else what no plan does without
    pools: tuple[str, ...]  # in the order in which it asks there
    held: Mapping[str, int]
    trains: bool
    is_active: bool = True
    refused: Mapping[str, float] = field(default_factory=dict[str, float])
    leaving: Mapping[str, int] = field(default_factory=dict[str, int])


class Share(Frozen):
    """How many VMs of each pool a job may have now: any number of one that is not named. `why` no more.

    `freed`: pools in which VMs were handed over since the job was refused there, so that it may ask again.
    """

    most: Mapping[str, int] = Field(default_factory=dict)
    why: str = ""
    freed: frozenset[str] = frozenset()


_SHARED = "other jobs share its pool, and no more VMs of it are free"


def pool_of(placement: Placement) -> str:
    """The pool of a VM that is asked for there."""
    if placement.provider not in CLOUDS:
        return placement.provider
    parts = placement.provider, placement.region, placement.zone, placement.instance_type, placement.market
    return "/".join(parts)


def shares(
    claims: Iterable[Claim],
    capacity: Mapping[str, int],
    freed: Mapping[str, float] | None = None,
    *,
    may_grow: bool = False,
) -> dict[str, Share]:
    """The share of each job that is active. Pure; shares of a pool together are never more than its capacity.

    `capacity`: how many VMs each pool has room for, as far as that is bounded; `may_grow`: it may have more
    later, as machines come back after the manager began; `freed`: when the last VM of a cloud's pool was
    handed over.
    """
    queue = sorted(claims, key=lambda claim: (-claim.priority, claim.submitted_at, claim.job))
    return Sharing(queue, capacity, freed or {}, may_grow=may_grow).run()


class Sharing:
    """One division of all pools."""

    def __init__(
        self,
        queue: Sequence[Claim],
        capacity: Mapping[str, int],
        freed: Mapping[str, float],
        *,
        may_grow: bool,
    ) -> None:
        self._queue = [claim for claim in queue if claim.is_active]
        held = Counter[str]()
        for claim in queue:
            held.update(claim.held)
            held.update(claim.leaving)
        self._freed = freed
        full = {
            pool: held[pool]
            for claim in self._queue
            if not claim.trains
            for pool in claim.refused.keys() - self._to_ask_again(claim)
        }
        self._ever = {} if may_grow else capacity
        self._capacity = {**full, **capacity}
        named = Counter(pool for claim in self._queue for pool in claim.pools)
        self._contested = {pool for pool, number in named.items() if number > 1}
        self._free = Counter(self._capacity)
        for claim in queue:
            if not claim.is_active:
                self._free.subtract(claim.held)
        self._given: dict[str, Counter[str]] = {claim.job: Counter[str]() for claim in self._queue}
        self._why: dict[str, str] = {}
        self._heads: dict[str, str] = {}  # by pool, the job for which too few are free
        self._asking = {  # pools of clouds, and the priority of the first who still asks there for its least
            pool: claim.priority
            for claim in reversed(self._queue)
            if not claim.trains and sum(claim.held.values()) < claim.least
            for pool in claim.pools
            if _is_cloud(pool) and (pool in claim.refused or claim.held.get(pool))
        }

    def run(self) -> dict[str, Share]:
        for claim in self._queue:
            if claim.trains:
                self._give_held(claim, claim.least)
        for _, group in groupby(self._queue, key=lambda claim: claim.priority):
            claims = list(group)
            for claim in claims:
                if not claim.trains:
                    self._give_least(claim)
            for claim in claims:
                if claim.trains:
                    self._give_held(claim, claim.most)
            for claim in claims:
                self._let_grow(claim)
        return {claim.job: self._share(claim) for claim in self._queue}

    # ---- the rules -----------------------------------------------------------------------------------------

    def _give_least(self, claim: Claim) -> None:
        """To a job that waits: all that it needs, or to the head of its pools what nobody holds."""
        ever = sum(self._ever.get(pool, math.inf) for pool in claim.pools)
        if ever < claim.least:
            has = f"{_named(claim.pools)} has {ever:g}"
            self._why[claim.job] = f"{_needs(claim)}, but {has}: other jobs go first until there are more"
            return
        open_pools = [pool for pool in claim.pools if pool not in self._heads]
        if sum(self._available(pool) for pool in open_pools) >= claim.least:
            self._give(claim, open_pools, claim.least, self._available)
            return
        self._why[claim.job] = self._queued(claim)
        if open_pools:
            self._give(claim, open_pools, claim.least, lambda pool: self._unheld(pool, claim))
            self._heads.update(dict.fromkeys(open_pools, claim.job))

    def _give_held(self, claim: Claim, most: int) -> None:
        """Of what it has, up to `most` in all."""
        missing = most - self._given[claim.job].total()
        pools = [pool for pool in claim.pools if claim.held.get(pool)]
        self._give(
            claim, pools, missing, lambda pool: min(self._available(pool), self._still_held(claim, pool))
        )

    def _let_grow(self, claim: Claim) -> None:
        """More, of what nobody has or waits for."""
        if not claim.trains and claim.job in self._why:
            return
        pools = [pool for pool in claim.pools if pool not in self._heads and pool in self._capacity]
        missing = claim.most - self._given[claim.job].total()
        self._give(claim, pools, missing, self._unclaimed)

    def _share(self, claim: Claim) -> Share:
        given, most = self._given[claim.job], dict[str, int]()
        for pool in claim.pools:
            is_head = self._heads.get(pool) == claim.job
            if pool not in self._contested or (is_head and _is_cloud(pool)):
                continue  # a cloud may have more by now: the head asks again
            if pool in self._capacity:
                most[pool] = given[pool]
            elif claim.trains and claim.priority <= self._asking.get(pool, -math.inf):
                most[pool] = claim.held.get(pool, 0)
        why = self._why.get(claim.job, _SHARED) if most else ""
        return Share(most=most, why=why, freed=self._to_ask_again(claim))

    def _to_ask_again(self, claim: Claim) -> frozenset[str]:
        """Pools that refused the job before VMs there were handed over."""
        return frozenset(pool for pool, at in claim.refused.items() if at < self._freed.get(pool, -math.inf))

    # ---- counting ------------------------------------------------------------------------------------------

    def _give(self, claim: Claim, pools: Iterable[str], missing: float, most: Callable[[str], float]) -> None:
        for pool in sorted(pools, key=lambda pool: -claim.held.get(pool, 0)):
            number = int(max(0, min(missing, most(pool))))
            missing -= number
            self._given[claim.job][pool] += number
            if pool in self._free:
                self._free[pool] -= number

    def _available(self, pool: str) -> float:
        """What is given to nobody so far."""
        return max(0, self._free[pool]) if pool in self._capacity else math.inf

    def _still_held(self, claim: Claim, pool: str) -> int:
        return claim.held.get(pool, 0) - self._given[claim.job][pool]

    def _unheld(self, pool: str, claim: Claim) -> float:
        """What `claim` has, and what no job has that trains, or is given."""
        return self._available(pool) - self._kept(pool, claim)

    def _unclaimed(self, pool: str) -> float:
        return self._available(pool) - self._kept(pool, None)

    def _kept(self, pool: str, but: Claim | None) -> int:
        """What jobs that train have of the pool beyond what they are given so far."""
        training = (claim for claim in self._queue if claim.trains and claim is not but)
        return sum(max(0, self._still_held(claim, pool)) for claim in training)

    def _queued(self, claim: Claim) -> str:
        before = sum(
            not other.trains and set(other.pools) & set(claim.pools) != set() and other.job in self._why
            for other in self._queue[: self._queue.index(claim)]
        )
        needs, queue = _needs(claim), f"in the queue for {_named(claim.pools)}"
        if before:
            return f"{needs}, and {before} {'jobs are' if before > 1 else 'job is'} ahead of it {queue}"
        return f"{needs}, and fewer are free; it is first {queue}"


def _named(pools: Iterable[str]) -> str:
    """The pools, without zones and markets."""
    parts = (pool.split("/") for pool in pools)
    return " and ".join(dict.fromkeys("/".join([*it[:2], *it[3:4]]) for it in parts))


def _needs(claim: Claim) -> str:
    why = "resources.min_nodes" if claim.is_min else "no plan was found for fewer"
    return f"it needs {claim.least} VM{'s' if claim.least != 1 else ''} ({why})"


def _is_cloud(pool: str) -> bool:
    return pool.partition("/")[0] in CLOUDS
