"""List scheduling in unit time: Varuna's three rules (§3.2), and 1F1B as the same with a window of the depth.

Time runs in units of T_f: a forward or a recomputation takes one, a backward two. At each unit every idle
worker takes the first of: the backward it must wait for after a recomputation (rule 2); a backward whose
gradient is there; a recomputation that is due because the next hop's backward ends one unit from now (rule
1), or has ended; a forward. So backwards come before forwards (rule 3). All integers, one pass: P=36, N=8192
takes seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from .components import Component
from .operations import Kind


class Task(NamedTuple):
    """An operation named by its place in a component: which path, which hop, and the how-manieth micro-batch
    of the path.
    """

    path: int
    stage: int
    kind: Kind
    turn: int


@dataclass(slots=True)
class _Lane:
    """One hop of one path."""

    path: int
    stage: int
    worker: int
    micro_batches: tuple[int, ...]
    before: int | None
    after: int | None
    enters: bool  # the first visit of the path to this worker: its micro-batches count against the window
    recomputes: bool
    limit: int | None  # micro-batches in flight on the worker beyond which none enters


@dataclass(slots=True)
class _Worker:
    tasks: list[Task] = field(default_factory=list[Task])
    busy: bool = False
    held: tuple[int, int] | None = None  # (lane, index) recomputed, its backward not yet run
    in_flight: int = 0
    entering: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    returning: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    backwards: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    recomputes: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])


def list_schedule(
    part: Component, *, window: int | None, recompute: bool, limit_to_depth: bool
) -> dict[int, list[Task]]:
    """The tasks of each worker of the component, in order.

    `limit_to_depth` is 1F1B: a worker admits a micro-batch only while fewer are in flight than hops are left.
    """
    lanes = _lanes(part, window, recompute, limit_to_depth)
    run = _Run(lanes, {worker: _Worker() for worker in part.workers})
    run.finish()
    return {worker: state.tasks for worker, state in run.workers.items()}


def _lanes(part: Component, window: int | None, recompute: bool, limit_to_depth: bool) -> list[_Lane]:
    lanes: list[_Lane] = []
    for number, path in enumerate(part.paths):
        last = len(path.hops) - 1
        for stage, hop in enumerate(path.hops):
            limits = [window] * (window is not None) + [last + 1 - stage] * limit_to_depth
            lanes.append(
                _Lane(
                    path=number,
                    stage=stage,
                    worker=hop.worker,
                    micro_batches=path.micro_batches,
                    before=len(lanes) - 1 if stage > 0 else None,
                    after=len(lanes) + 1 if stage < last else None,
                    enters=all(hop.worker != earlier.worker for earlier in path.hops[:stage]),
                    recomputes=recompute and stage < last,
                    limit=min((limit for limit in limits if limit is not None), default=None),
                )
            )
    return lanes


_DUE = "due"  # no task, but the moment at which a recomputation should start
_Event = tuple[Kind | str, int, int]  # what (ends, or is due), lane, index


class _Run:
    def __init__(self, lanes: list[_Lane], workers: dict[int, _Worker]) -> None:
        self.lanes = lanes
        self.workers = workers
        self.left = 2 * sum(
            len(lane.micro_batches) for lane in lanes
        )  # forwards and backwards not yet started
        self.arrived: set[tuple[int, int]] = set()  # gradients at lanes that recompute
        self.touched: set[int] = set(workers)
        # What happens one and two units from now; nothing lasts longer than a backward.
        self.soon: list[_Event] = []
        self.later: list[_Event] = []
        for number, lane in enumerate(lanes):
            if lane.before is None:
                for index in range(len(lane.micro_batches)):
                    self.offer_forward(number, index)

    def finish(self) -> None:
        while self.left:
            for name in sorted(self.touched):
                worker = self.workers[name]
                if not worker.busy:
                    self.start(worker)
            if not self.soon and not self.later:
                self.force_forward()
            self.touched.clear()
            now, self.soon, self.later = self.soon, self.later, []
            for event in now:
                self.happen(*event)

    def start(self, worker: _Worker) -> None:
        if worker.held is not None:
            if worker.held in self.arrived:
                self.arrived.discard(worker.held)
                self.backward(worker, *worker.held)
                worker.held = None
        elif worker.backwards:
            self.backward(worker, *worker.backwards.popleft())
        elif worker.recomputes:
            worker.held = worker.recomputes.popleft()
            self.run(worker, Kind.RECOMPUTE, *worker.held)
        elif heap := self.admissible(worker):
            _, number, index = heapq.heappop(heap)
            self.forward(worker, number, index)

    def admissible(self, worker: _Worker) -> list[tuple[int, int, int]] | None:
        """The heap whose first forward may run now, the lower micro-batch first."""
        entering = None
        if worker.entering:
            limit = self.lanes[worker.entering[0][1]].limit
            if limit is None or worker.in_flight < limit:
                entering = worker.entering
        if entering and worker.returning:
            return min(entering, worker.returning)
        return entering or worker.returning or None

    def force_forward(self) -> None:
        """Paths that cross can fill each other's windows; then the forward nearest to its end goes ahead."""
        waiting = [heap[0] for worker in self.workers.values() if (heap := worker.entering)]
        assert waiting, "work is left, none runs and none is ready"
        _, number, index = min(waiting, key=lambda item: (-self.lanes[item[1]].stage, item))
        worker = self.workers[self.lanes[number].worker]
        heapq.heappop(worker.entering)
        self.forward(worker, number, index)

    def forward(self, worker: _Worker, number: int, index: int) -> None:
        worker.in_flight += self.lanes[number].enters
        self.left -= 1
        self.run(worker, Kind.FORWARD, number, index)

    def backward(self, worker: _Worker, number: int, index: int) -> None:
        before = self.lanes[number].before
        self.left -= 1
        self.run(worker, Kind.BACKWARD, number, index)
        if before is not None and self.lanes[before].recomputes:
            self.soon.append((_DUE, before, index))

    def run(self, worker: _Worker, kind: Kind, number: int, index: int) -> None:
        lane = self.lanes[number]
        worker.tasks.append(Task(lane.path, lane.stage, kind, index))
        worker.busy = True
        (self.later if kind is Kind.BACKWARD else self.soon).append((kind, number, index))

    def happen(self, what: Kind | str, number: int, index: int) -> None:
        lane = self.lanes[number]
        worker = self.workers[lane.worker]
        self.touched.add(lane.worker)
        if what == _DUE:
            worker.recomputes.append((number, index))
            return
        worker.busy = False
        if what is Kind.FORWARD:
            if lane.after is None:
                worker.backwards.append((number, index))
            else:
                self.offer_forward(lane.after, index)
        elif what is Kind.BACKWARD:
            worker.in_flight -= lane.enters
            if lane.before is not None:
                self.offer_backward(lane.before, index)

    def offer_forward(self, number: int, index: int) -> None:
        lane = self.lanes[number]
        worker = self.workers[lane.worker]
        heap = worker.entering if lane.enters else worker.returning
        heapq.heappush(heap, (lane.micro_batches[index], number, index))
        self.touched.add(lane.worker)

    def offer_backward(self, number: int, index: int) -> None:
        lane = self.lanes[number]
        if lane.recomputes:
            self.arrived.add((number, index))
        else:
            self.workers[lane.worker].backwards.append((number, index))
        self.touched.add(lane.worker)
