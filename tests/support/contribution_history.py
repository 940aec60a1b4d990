"""Seeded histories of workers that train, break off and form again: is each contribution added once?

A worker's sums are the lists of what was added to them. Everything that decides is the product's: the
agreement on the state, the choice of parcels, and what a worker does with its own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from makara.morphing import CommitProof, MemberState, agree
from makara.morphing.in_flight import Parcel, StepId, StepInFlight, continue_step
from makara.pipeline.contributions import WORD, Pairs, whole_tally
from makara.protocol.messages import CheckpointRef
from makara.worker.execution.parcels import Bucket, Parcels

NUM_SECTIONS = 4
BUCKETS: tuple[Bucket, ...] = ((0,), (1,), (2,), (3,), (0, 3))  # a parameter is tied between the ends

Steps = Generator[Callable[[], bool] | None]
"""Yields conditions to wait for; None: let others go on."""


class Wrong(AssertionError):
    """A step was committed that is not the sum of each contribution once."""


@dataclass
class Added:
    """A sum: how often each contribution was added with each scale; and, once reduced, others' as well."""

    counts: Counter[tuple[int, int, str]] = field(default_factory=Counter[tuple[int, int, str]])

    @property
    def size_bytes(self) -> int:
        return 1

    def trim(self, pairs: Pairs) -> None:
        """Nothing is added before a contribution is."""

    def merge(self, other: Added) -> None:
        self.counts += other.counts


@dataclass
class Reduced:
    step: int
    generation: int
    attempt: int
    sections: frozenset[int]


class Worker:
    def __init__(self, name: int) -> None:
        self.name = name
        self.applied: int | None = None
        self.branch = 0
        self.agreed_in = 0
        self.record: CommitProof | None = None
        self.reduced: Reduced | None = None
        self.sections: frozenset[int] = frozenset()
        self.parcels: Parcels[Added] = Parcels()

    def standing(self) -> MemberState:
        return MemberState(
            applied_step=self.applied,
            record=self.record,
            reduced_step=None if self.reduced is None else self.reduced.step + 1,
            sections=self.sections if self.applied is not None else frozenset(),
            reduced_by=None if self.reduced is None else (self.reduced.generation, self.reduced.attempt),
            branch=self.branch,
            agreed_in=self.agreed_in,
        )

    def apply(self, record: CommitProof) -> None:
        if self.reduced is None or not self.sections <= self.reduced.sections:
            raise Wrong(f"step {record} is applied to {self.sections} with gradients of {self.reduced}")
        self.applied, self.branch, self.record, self.reduced = (
            record.num_steps,
            record.generation,
            record,
            None,
        )
        self.parcels.end()

    def forget(self) -> None:
        self.applied = self.record = self.reduced = None
        self.branch = self.agreed_in = 0
        self.sections = frozenset()
        self.parcels.drop()


@dataclass(frozen=True)
class Order:
    """One generation: the first workers of `members` train, range by range and replica by replica."""

    number: int
    members: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # of each rank that trains
    checkpoints: tuple[CheckpointRef, ...]

    def hosts(self, bucket: Bucket) -> tuple[int, ...]:
        held = (
            rank for rank, (start, stop) in enumerate(self.ranges) if any(start <= k < stop for k in bucket)
        )
        return tuple(held)

    def sections(self, rank: int) -> range:
        return range(*self.ranges[rank]) if rank < len(self.ranges) else range(0)


@dataclass
class Board:
    """What the members of a generation have posted."""

    posts: dict[str, dict[int, Any]] = field(default_factory=dict[str, dict[int, Any]])

    def post(self, name: str, rank: int, value: Any) -> None:
        self.posts.setdefault(name, {})[rank] = value

    def full(self, name: str, number: int) -> Callable[[], bool]:
        return lambda: len(self.posts.get(name, {})) == number

    def read(self, name: str) -> list[Any]:
        return [value for _, value in sorted(self.posts[name].items())]


class History:
    """One history of a job. `play` raises `Wrong` if a step is committed that is not whole."""

    reduces_in_place = False
    """Sums over workers overwrite each worker's own, as they must not."""

    def __init__(self, seed: int, *, steps: int = 3, checks_tallies: bool = True) -> None:
        self.chance = random.Random(seed)
        self.num_micro_batches = self.chance.randint(1, 8)
        self.steps = steps
        self.checks_tallies = checks_tallies
        self.workers = [Worker(name) for name in range(self.chance.randint(1, 6))]
        self.generation = 0
        self.published: list[CheckpointRef] = []
        self.committed = 0
        self.kept = 0
        """Contributions that a generation took over."""
        self.caught = 0
        """Steps that the tallies refused."""
        self.fast = self.chance.random() < 0.3  # scales never differ

    def play(self) -> None:
        for _ in range(400):
            if self.committed >= self.steps:
                return
            self._generation()
        raise AssertionError("no progress")

    def _generation(self) -> None:
        chance = self.chance
        self.generation += 1
        for worker in self.workers:
            if chance.random() < 0.05:  # a new one in its place
                worker.__init__(worker.name)
        members = chance.sample(self.workers, chance.randint(1, len(self.workers)))
        order = self._order([worker.name for worker in members])
        board = Board()
        running = {
            worker.name: self._member(order, board, rank, worker) for rank, worker in enumerate(members)
        }
        waits: dict[int, Callable[[], bool] | None] = dict.fromkeys(running)
        speeds = {name: chance.choice([1.0, 1.0, 0.02]) for name in running}
        turns = self.num_micro_batches * NUM_SECTIONS * len(members)
        breaks_after = chance.choice([turns, turns, turns, 4 * turns, 100_000])
        breaks_after = chance.randint(0, breaks_after)
        for _ in range(breaks_after):
            ready = [name for name, wait in waits.items() if wait is None or wait()]
            if not ready:
                return
            name = chance.choices(ready, [speeds[name] for name in ready])[0]
            try:
                waits[name] = next(running[name])
            except StopIteration:
                del waits[name]
            if not waits:
                return
        for name in running:
            if chance.random() < 0.3:  # it dies, and a new one comes some time
                self.workers[name].__init__(name)

    def _order(self, members: Sequence[int]) -> Order:
        depth = self.chance.randint(1, min(len(members), NUM_SECTIONS))
        cuts = sorted(self.chance.sample(range(1, NUM_SECTIONS), depth - 1))
        ranges = list(zip([0, *cuts], [*cuts, NUM_SECTIONS], strict=True))
        replicas = self.chance.randint(1, len(members) // depth)
        return Order(self.generation, tuple(members), tuple(ranges * replicas), tuple(self.published[::-1]))

    def _member(self, order: Order, board: Board, rank: int, worker: Worker) -> Steps:
        """One worker's life in one generation."""
        everyone = len(order.members)
        parcels = worker.parcels
        space: float | None = None
        if self.chance.random() < 0.1:
            parcels.make_room(self.chance.randint(0, 2 * len(BUCKETS)))
            space = self.chance.randint(0, 2)
        board.post("standing", rank, (worker.standing(), parcels.show(), space))
        yield board.full("standing", everyone)
        standings: list[MemberState] = [state for state, _, _ in board.read("standing")]
        room = {n: space for n, (_, _, space) in enumerate(board.read("standing")) if space is not None}
        agreement = agree(standings, num_sections=NUM_SECTIONS, checkpoints=order.checkpoints)
        everybodys: list[list[Parcel]] = [
            shown if number in agreement.keep else []
            for number, (_, shown, _) in enumerate(board.read("standing"))
        ]
        if rank not in agreement.keep:
            worker.forget()
        for application in agreement.apply:
            if application.member == rank:
                record = standings[application.record_holder].record
                assert record is not None
                worker.apply(record)
        yield None
        if agreement.step is None:
            ref = order.checkpoints[0] if order.checkpoints else CheckpointRef(step=0, generation=0)
            step, branch, flight = ref.step, ref.generation, self._nothing()
        else:
            step, branch = agreement.step, agreement.branch
            flight = continue_step(
                everybodys,
                step=step,
                branch=branch,
                hosts={bucket: order.hosts(bucket) for bucket in BUCKETS},
                num_micro_batches=self.num_micro_batches,
                room=room,
                sizes=dict.fromkeys(BUCKETS, Added().size_bytes),
            )
            yield from self._copy_sections(order, board, rank, worker, agreement.holders)
        for number, move in enumerate(flight.moves):
            if move.member == rank:
                if rank not in agreement.keep:
                    raise Wrong(f"{move} was computed from another state, and dropped")
                board.post(f"parcel/{number}", rank, Added(Counter(parcels.sum_of(move.number).counts)))
                yield None
            elif move.destination == rank:
                space = math.inf if space is None else space - 1
                assert space >= 0, "nobody is sent more than it has room for"
                yield board.full(f"parcel/{number}", 1)
                total = board.read(f"parcel/{number}")[0]
                parcels.receive(move, total, everybodys[move.member][move.number])
                yield None
        worker.applied, worker.branch, worker.agreed_in = step, branch, order.number
        worker.sections |= set(order.sections(rank))
        if worker.record is not None and worker.record.num_steps != step:
            worker.record = None
        worker.reduced = None
        board.post("ready", rank, (flight, step, branch))
        yield board.full("ready", everyone)
        assert len({str(ready) for ready in board.read("ready")}) == 1, "all choose alike"
        worker.sections = frozenset(order.sections(rank))
        hosted = [bucket for bucket in BUCKETS if rank in order.hosts(bucket)]
        of = StepId(step, branch, flight.attempt)
        parcels.settle(rank, of, flight, {b: self._scale(of, b) for b in hosted}, lambda _: Added())
        if rank == 0:
            self.kept += sum(len(one.pairs) for one in flight.kept)
        if rank < len(order.ranges):
            yield from self._train(order, board, rank, worker)

    def _nothing(self) -> StepInFlight:
        return StepInFlight(0, (), {bucket: Pairs.all(bucket, self.num_micro_batches) for bucket in BUCKETS})

    def _computed_from(self, of: StepId) -> str:
        """What the values of a gradient's contribution depend on, besides micro-batch and section."""
        return f"{of.step}.{of.branch}" if self.fast else f"{of.step}.{of.attempt}"

    def _scale(self, of: StepId, bucket: Bucket) -> str:
        return "" if self.fast else f"{of.step}.{of.attempt}.{bucket}"

    def _copy_sections(
        self, order: Order, board: Board, rank: int, worker: Worker, holders: Mapping[int, Sequence[int]]
    ) -> Steps:
        for section in order.sections(rank):
            if section not in worker.sections or worker.applied is None:
                assert holders[section]
                yield None
                worker.sections |= {section}
                worker.reduced = None

    def _train(self, order: Order, board: Board, rank: int, worker: Worker) -> Steps:
        trainers = len(order.ranges)
        parcels = worker.parcels
        while True:
            of = parcels.of
            assert of is not None
            assert of.step == worker.applied
            turn = f"{of.step}.{of.attempt}"
            for micro_batch, section in self._work(order, rank, of, parcels.missing):
                totals = [parcels.adds(b, micro_batch, section) for b in parcels.sums() if section in b]
                for total in filter(None, totals):
                    total.counts[micro_batch, section, self._computed_from(of)] += 1
                    yield None
                parcels.added(micro_batch, section)
                yield None
            hosted = [bucket for bucket in BUCKETS if rank in order.hosts(bucket)]
            board.post(f"sums/{turn}", rank, self._copies(parcels, hosted))
            yield board.full(f"sums/{turn}", trainers)
            totals, tallies = _reduced(board.read(f"sums/{turn}"))
            if self.reduces_in_place:
                for bucket, own in parcels.sums().items():
                    own.counts = Counter(totals[bucket])
            worker.reduced = Reduced(of.step, order.number, of.attempt, worker.sections)
            overflow = (
                random.Random(f"{self.num_micro_batches}/{of}").random() < 0.4
                and of.attempt < 2
                and not self.fast
            )
            board.post(f"vote/{turn}", rank, None)
            yield board.full(f"vote/{turn}", trainers)
            if overflow or not self._is_whole(tallies):
                if not overflow:
                    self.caught += rank == 0
                worker.reduced = None
                attempt = of.attempt + 1 if overflow else 0
                self._begin(parcels, StepId(of.step, of.branch, attempt), hosted)
                if not overflow:  # a next vote on the same step and attempt needs names of its own
                    board.posts = {name: posts for name, posts in board.posts.items() if turn not in name}
                    return
                continue
            self._check(of, totals)
            worker.apply(CommitProof(of.step + 1, of.attempt, order.number))
            self.committed = max(self.committed, of.step + 1)
            yield None
            if self.chance.random() < 0.1:
                ref = CheckpointRef(step=of.step + 1, generation=order.number)
                if ref not in self.published:
                    self.published.append(ref)
            self._begin(parcels, StepId(of.step + 1, order.number, 0), hosted)
            if self.committed >= self.steps:
                return

    def _copies(self, parcels: Parcels[Added], hosted: Iterable[Bucket]) -> dict[Bucket, tuple[Added, int]]:
        sums = parcels.sums()
        tallies = parcels.tallies()
        return {bucket: (Added(Counter(sums[bucket].counts)), tallies[bucket]) for bucket in hosted}

    def _begin(self, parcels: Parcels[Added], of: StepId, hosted: Sequence[Bucket]) -> None:
        scales = {bucket: self._scale(of, bucket) for bucket in hosted}
        parcels.begin(of, self._nothing().missing, scales, {bucket: Added() for bucket in hosted})

    def _work(
        self, order: Order, rank: int, of: StepId, missing: Mapping[Bucket, Pairs]
    ) -> list[tuple[int, int]]:
        """The missing contributions that this rank adds, in the order in which it does."""
        deal = random.Random(f"{order.number}/{of}")
        depth = 1 + order.ranges.index(next(r for r in order.ranges if r[1] == NUM_SECTIONS))
        paths = [range(first, first + depth) for first in range(0, len(order.ranges), depth)]
        work: list[tuple[int, int]] = []
        for micro_batch in range(self.num_micro_batches):
            path = deal.choice(paths)
            open_sections = {k for pairs in missing.values() for i, k in pairs if i == micro_batch}
            if rank in path:
                work += [(micro_batch, k) for k in order.sections(rank) if k in open_sections]
        deal.shuffle(work)
        return work

    def _is_whole(self, tallies: Mapping[Bucket, int]) -> bool:
        if not self.checks_tallies:
            return True
        return all(tallies[bucket] == whole_tally(bucket, self.num_micro_batches) for bucket in BUCKETS)

    def _check(self, of: StepId, totals: Mapping[Bucket, Counter[tuple[int, int, str]]]) -> None:
        for bucket, counts in totals.items():
            expected = {(i, k) for k in bucket for i in range(self.num_micro_batches)}
            added = Counter((i, k) for i, k, _ in counts.elements())
            scales = {scale for _, _, scale in counts}
            if added != Counter(expected) or len(scales) > 1:
                raise Wrong(f"step {of}: bucket {bucket} is {dict(counts)}")


def _reduced(
    posted: Sequence[Mapping[Bucket, tuple[Added, int]]],
) -> tuple[dict[Bucket, Counter[tuple[int, int, str]]], dict[Bucket, int]]:
    totals: dict[Bucket, Counter[tuple[int, int, str]]] = {}
    tallies: dict[Bucket, int] = {}
    for mine in posted:
        for bucket, (added, tally) in mine.items():
            totals[bucket] = totals.get(bucket, Counter()) + added.counts
            tallies[bucket] = (tallies.get(bucket, 0) + tally) & WORD
    return totals, tallies
