"""Seeded histories of jobs that share pools, in ticks: jobs act as `core.pools.giving_up` has them act.

A job asks for VMs up to its share and trains while `least` have joined. It gives up what is beyond its share:
by a change that takes a few ticks if it trains, else after a while. VMs die, machines come and go, and a
cloud has a number of VMs that the queue is not told: who is refused there waits before it asks again. Then
nothing goes wrong any more, and all jobs finish.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from makara.manager.core.pools.shares import Claim, Share, shares

OWN, OTHER, CLOUD = "static", "local", "aws/r/large"
_GIVEN_BACK = 12  # ticks for which one that waits keeps what it has
_MORPH = 3
_PAUSE = 20  # ticks after a refusal
_MIXED = [(OWN,), (OWN,), (OTHER,), (CLOUD,), (OWN, CLOUD)]
_QUIET = 3000  # ticks in which all that can finish does

Divide = Callable[[Iterable[Claim], Mapping[str, int], Mapping[str, float]], dict[str, Share]]


class Violated(AssertionError):
    """What the queue promises does not hold."""


@dataclass
class _Job:
    name: str
    priority: int
    submitted_at: int
    least: int
    most: int
    pools: tuple[str, ...]
    work: int
    held: Counter[str] = field(default_factory=Counter[str])
    idle: int = 0  # ticks in which it had VMs and did not train
    pause: int = 0  # ... in which it asks no cloud, after too long a wait there
    pauses: int = 0
    morph: int = 0
    leaving: Counter[str] = field(default_factory=Counter[str])  # until that change is over
    refused: dict[str, float] = field(default_factory=dict[str, float])
    asks_at: int = 0  # when it asks the cloud again after a refusal
    has_trained: bool = False
    ended: bool = False  # its VMs are not gone yet

    @property
    def trains(self) -> bool:
        return self.held.total() >= self.least and not self.ended

    def claim(self) -> Claim:
        pools = tuple(pool for pool in self.pools if pool != CLOUD or not self.pause)
        return Claim(
            job=self.name,
            priority=self.priority,
            submitted_at=self.submitted_at,
            least=self.least,
            most=self.most,
            pools=pools,
            held=Counter(self.held),
            trains=self.trains,
            is_active=not self.ended,
            refused={pool: at for pool, at in self.refused.items() if pool in pools},
            leaving=Counter(self.leaving),
        )


class PoolHistory:
    """One history. `divide`: how pools are shared; tests put others in its place."""

    def __init__(self, seed: int, divide: Divide = shares) -> None:
        self._dice = dice = random.Random(seed)
        self._divide = divide
        self._room = {OWN: dice.randint(1, 8), OTHER: dice.randint(1, 6), CLOUD: dice.randint(1, 8)}
        self._coming = sorted(dice.randint(0, 60) for _ in range(dice.randint(2, 8)))
        self._num_jobs = len(self._coming)
        self._wanted = _MIXED if dice.random() < 0.7 else [(CLOUD,)]  # pools that jobs ask
        self._jobs: list[_Job] = []
        self._now = 0
        self._freed: dict[str, float] = {}
        self._handed_over = 0  # VMs of the cloud, since one that waits asked there
        self._needed = 0  # VMs of the cloud that may be handed over, when shares were found
        self._ticks: Counter[tuple[str, str]] = Counter()  # for how long something has been so

    def run(self) -> int:
        """Play it to its end; returns how many jobs finished. Raises `Violated`."""
        last = self._coming[-1] + self._dice.randint(0, 60)
        while self._now <= last:
            self._submit()
            self._faults()
            self._tick()
        for _ in range(_QUIET):
            if not self._jobs:
                break
            self._tick()
        stuck = [job for job in self._jobs if self._can_ever(job)]
        if stuck:
            raise Violated(
                f"deadlock: {[(job.name, job.least, dict(job.held)) for job in stuck]} of {self._room}"
            )
        return self._num_jobs - len(self._jobs)

    def _can_ever(self, job: _Job) -> bool:
        return sum(self._room[pool] for pool in job.pools) >= job.least

    def _submit(self) -> None:
        while self._coming and self._coming[0] <= self._now:
            submitted_at, dice, least = self._coming.pop(0), self._dice, self._dice.randint(1, 4)
            job = _Job(
                name=f"j{self._num_jobs - len(self._coming)}",
                priority=dice.choice([0, 0, 0, 0, 1]),
                submitted_at=submitted_at,
                least=least,
                most=least + dice.randint(0, 5),
                pools=dice.choice(self._wanted),
                work=dice.randint(5, 200),
            )
            self._jobs.append(job)

    def _faults(self) -> None:
        dice = self._dice
        for job in self._jobs:
            for pool in [pool for pool, number in job.held.items() if number and dice.random() < 0.03]:
                job.held[pool] -= 1
        if dice.random() < 0.05:
            pool = dice.choice([OWN, OTHER, CLOUD])
            self._room[pool] = max(1, self._room[pool] + dice.choice([-1, 1]))
            self._take_back(pool)

    def _take_back(self, pool: str) -> None:
        while self._in_use(pool) > self._room[pool]:
            holders = [job for job in self._jobs if job.held[pool]]
            if not holders:
                break
            self._dice.choice(holders).held[pool] -= 1

    def _in_use(self, pool: str) -> int:
        return sum(job.held[pool] + job.leaving[pool] for job in self._jobs)

    # ---- a tick --------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._now += 1
        claims = [job.claim() for job in self._jobs]
        known = {OWN: self._room[OWN], OTHER: self._room[OTHER]}
        found = self._divide(claims, known, self._freed)
        self._needed = self._may_be_handed_over()
        self._check_shares(found, known)
        for job in self._dice.sample(self._jobs, len(self._jobs)):
            if job.ended:
                self._go(job)
                continue
            share = found.get(job.name, Share())
            self._give_up(job, share)
            self._ask(job, share)
            self._check_held(job, share)
        self._check_order(found)
        for job in list(self._jobs):
            self._train(job)

    def _give_up(self, job: _Job, share: Share) -> None:
        surplus = {pool: job.held[pool] - most for pool, most in share.most.items() if job.held[pool] > most}
        job.idle = 0 if job.trains or not job.held.total() else job.idle + 1
        job.morph = max(0, job.morph - 1)
        if not job.morph and job.leaving:
            self._freed |= dict.fromkeys(+job.leaving, float(self._now))
            job.leaving.clear()
        if surplus and job.trains and not job.morph:
            job.held.subtract(surplus)
            job.leaving, job.morph = Counter(surplus), _MORPH
            self._note_handed_over(surplus.get(CLOUD, 0))
        elif surplus and not job.trains and job.idle >= _GIVEN_BACK:
            job.held.subtract(surplus)
        if not job.trains and job.held[CLOUD] and _is_too_dear(job):
            job.held[CLOUD], job.pause, job.pauses = 0, _GIVEN_BACK * 2**job.pauses, min(job.pauses + 1, 8)
        elif job.pause:
            job.pause -= 1

    def _go(self, job: _Job) -> None:
        """A job that has ended: its VMs are gone after a while."""
        job.morph -= 1
        if not job.morph:
            self._freed |= dict.fromkeys(+job.leaving, float(self._now))
            self._jobs.remove(job)

    def _wait(self) -> list[_Job]:
        return [job for job in self._jobs if not job.trains and not job.ended]

    def _may_be_handed_over(self) -> int:
        """VMs of the cloud for those that wait, and for those above them, who grow with what is freed.

        Once one was refused, the pool is known to be full, also to those that have not asked yet.
        """
        waiting = [job for job in self._wait() if CLOUD in job.pools]
        self._handed_over *= bool(waiting)
        lowest = min((job.priority for job in waiting), default=0)
        above = [job for job in self._jobs if job.trains and CLOUD in job.pools and job.priority > lowest]
        return sum(job.least for job in waiting) + sum(job.most - job.held.total() for job in above)

    def _note_handed_over(self, number: int) -> None:
        self._handed_over += number
        if number and self._handed_over > self._needed:
            raise Violated(f"{self._handed_over} VMs of a cloud are handed over before any is asked for")

    def _ask(self, job: _Job, share: Share) -> None:
        for pool in job.pools:
            may_ask = not job.pause and (self._now >= job.asks_at or CLOUD in share.freed)
            if pool == CLOUD and not may_ask:
                continue
            most = share.most.get(pool, job.most)
            while job.held.total() < job.most and job.held[pool] < most:
                if self._in_use(pool) >= self._room[pool]:
                    if pool == CLOUD:
                        job.refused[pool], job.asks_at = float(self._now), self._now + _PAUSE
                        self._handed_over = 0 if not job.trains else self._handed_over
                    break
                if pool == CLOUD and not job.trains:
                    self._handed_over = max(0, self._handed_over - 1)
                job.held[pool] += 1
                job.refused.pop(pool, None)

    def _train(self, job: _Job) -> None:
        if job.trains:
            job.has_trained, job.pauses = True, 0
            job.work -= job.held.total()
        if job.work <= 0 and not job.ended:
            job.leaving, job.morph, job.ended = job.held + job.leaving, _MORPH, True
            job.held = Counter[str]()

    # ---- what is promised ----------------------------------------------------------------------------------

    def _check_shares(self, found: Mapping[str, Share], known: Mapping[str, int]) -> None:
        """Caps hold, and one job at most may hold VMs of a pool without having its least."""
        for pool, room in known.items():
            given = [share.most[pool] for share in found.values() if pool in share.most]
            if sum(given) > room:
                raise Violated(f"{given} VMs of {pool} are given, which has {room}")
            jobs = [job for job in self._jobs if job.pools == (pool,) and not job.ended]
            most = {job.name: found[job.name].most.get(pool, job.most) for job in jobs}
            heads = [job.name for job in jobs if not job.trains and 0 < most[job.name] < job.least]
            if len(heads) > 1:
                raise Violated(f"{heads} may all hold VMs of {pool} that are too few for them")
            for job in jobs:
                if job.trains and most[job.name] < job.least:
                    raise Violated(f"{job.name} trains, and is to give up what it needs")
                if not job.trains and most[job.name] < job.least <= room:
                    self._check_growth(job, jobs, most)

    def _check_growth(self, waiting: _Job, jobs: Sequence[_Job], most: Mapping[str, int]) -> None:
        """While one waits, no other that is not above it is given more."""
        below = [job for job in jobs if job.trains and job.priority <= waiting.priority]
        grows = [job.name for job in below if most[job.name] > job.held.total()]
        if grows:
            raise Violated(f"{grows} are given more while {waiting.name} waits")

    def _check_held(self, job: _Job, share: Share) -> None:
        """What is beyond its share is given back in time, and a wait on a cloud costs a bounded sum."""
        surplus = any(job.held[pool] > most for pool, most in share.most.items())
        self._count("holds what others wait for", job, surplus, _GIVEN_BACK + 2)
        waits = job.pools == (CLOUD,) and not job.trains and _is_too_dear(job)
        self._count("pays for a cloud", job, waits, 3)

    def _check_order(self, found: Mapping[str, Share]) -> None:
        """One that waits is not overtaken: none that came later, and is not above it, begins in its pool."""
        begun = [job for job in self._jobs if job.trains and not job.has_trained and len(job.pools) == 1]
        for job in begun:
            for other in self._wait():
                is_before = (-other.priority, other.submitted_at) < (-job.priority, job.submitted_at)
                waits = other.pools == job.pools != (CLOUD,)
                waits = waits and found[other.name].most[job.pools[0]] < other.least
                if is_before and waits and other.least <= self._room[job.pools[0]]:
                    raise Violated(f"{job.name} begins before {other.name}, which waits for {other.least}")

    def _count(self, what: str, job: _Job, holds: bool, bound: int) -> None:
        number = self._ticks[what, job.name] + 1 if holds else 0
        self._ticks[what, job.name] = number
        if number > bound:
            raise Violated(f"{job.name} {what}, for {number} ticks")


def _is_too_dear(job: _Job) -> bool:
    """What a job that waits may pay for VMs of a cloud that do nothing."""
    return job.idle * job.held[CLOUD] > job.least * _GIVEN_BACK or job.idle > 3 * _GIVEN_BACK
