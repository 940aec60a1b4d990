"""The next-operation policy: the one place that decides what a worker runs next, in tensors and virtual time.

A worker follows its static order. When the next operation's input is late it deviates (Varuna §3.2): it runs
the first backward instead of a forward, or the first forward instead of a backward. A recomputation counts as
part of its backward here, for once it has run nothing else may (rule 2). So it too lets a forward go first
while its gradient is on its way, and starts ahead of the gradient only when there is nothing else to do. But
forwards among themselves and backwards among themselves always run in the static order, so that what one
worker sends another has a fixed order for each kind.

It cannot deadlock. Let every worker be idle and every message delivered, and take, among all operations not
yet run, the one that comes first in some order of the whole plan that respects inputs and every worker's
static order (the list schedule's own time is one). Everything before it has run, so its input is there, and
it is the first one left on its worker. That worker runs it, unless it holds a recomputed micro-batch m and
waits for B(m) alone. But R(m) was either next in the static order, and then B(m), which follows it directly,
is the operation in question; or it was taken early, and then only because B(m)'s gradient was already there.
So somebody can run.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operations import Kind, Operation
from .plan import Plan, Schedule
from .schedules import InvalidOrder, orders


class Dispatcher:
    """What one worker runs next. Deterministic: the answers depend only on the calls made so far.

    `order` is the worker's static order; left out, it is that of the plan's schedule (computed for the whole
    plan: with many workers, call `orders` once and hand each its row). It is good for one step; `reset`
    begins another. Raises `InvalidOrder` if the order is not the worker's work, each operation once, F before
    B, and R directly before its B.
    """

    def __init__(self, plan: Plan, worker: int, order: Sequence[Operation] | None = None) -> None:
        self._order = tuple(orders(plan)[worker] if order is None else order)
        check_order(plan, worker, self._order)
        self._by_kind = {kind: [task for task in self._order if task.kind is kind] for kind in Kind}
        self._recomputed = {_key(task) for task in self._by_kind[Kind.RECOMPUTE]}
        self._known = {_key(task) for task in self._order}
        self._last_hop = {key for key in self._known if key[0] == len(plan.path_of(key[1]).hops) - 1}
        self._entering = {key for key in self._known if key[0] == 0}
        self._window = plan.window
        if plan.schedule is Schedule.ONE_F_ONE_B:
            # Bounded memory is the point of 1F1B: running ahead may not exceed what its own order needs.
            needed = peak_in_flight(self._order)
            self._window = needed if plan.window is None else min(needed, plan.window)
        self.reset()

    def reset(self) -> None:
        """Begin a step: nothing has run and nothing has arrived."""
        self._remaining = len(self._order)
        self._num_taken = dict.fromkeys(Kind, 0)
        self._position = 0  # of the first operation in the static order that is not taken
        self._activations = set(self._entering)
        self._gradients: set[_Key] = set()
        self._held: Operation | None = None  # the backward whose recomputation is done
        self._in_flight: dict[int, int] = {}  # micro-batch -> forwards without their backward

    @property
    def remaining(self) -> int:
        """Operations not yet taken."""
        return self._remaining

    def recomputes(self, micro_batch: int, stage: int) -> bool:
        """Whether an R comes between this F and its B: then only the hop's inputs are kept until the R."""
        return (stage, micro_batch) in self._recomputed

    def arrived(self, operation: Operation) -> None:
        """The input of `operation` is here: activations for an F (stage 0 needs none), the gradient for a B.

        It makes no difference whether it came from a peer or from the hop before or after on the same worker.
        The B of a path's last hop needs no call. Raises `InvalidOrder` for an operation that the worker does
        not run or that takes no input.
        """
        if _key(operation) not in self._known or operation.kind not in (Kind.FORWARD, Kind.BACKWARD):
            raise InvalidOrder(f"an input came for {operation}, which this worker does not run")
        (self._activations if operation.kind is Kind.FORWARD else self._gradients).add(_key(operation))

    def next(self) -> Operation | None:
        """Takes and returns the operation to run now; call it when the one before has finished.

        None: nothing may run before another input arrives, or nothing is left.
        """
        task = self._choose()
        if task is not None:
            self._take(task)
        return task

    def _choose(self) -> Operation | None:
        if (
            self._held is not None
        ):  # rule 2: a recomputed micro-batch waits for its backward, whatever else is ready
            return self._held if _key(self._held) in self._gradients else None
        planned = self._planned()
        if planned is None or self._is_ready(planned):
            return planned
        if planned.kind is Kind.FORWARD:
            return self._early_backward()
        ahead = self._early_forward()
        if planned.kind is Kind.RECOMPUTE and (ahead is None or _key(ahead) not in self._recomputed):
            # Its own forward is done, so it can run; and a forward that keeps its activations would be a
            # second set of them beside its own.
            return planned
        return ahead

    def _planned(self) -> Operation | None:
        """The first operation of the static order that is not taken."""
        while self._position < len(self._order):
            task = self._order[self._position]
            if self._first(task.kind) == task:
                return task
            self._position += 1
        return None

    def _first(self, kind: Kind) -> Operation | None:
        """The first of its kind that is not taken."""
        taken = self._num_taken[kind]
        return self._by_kind[kind][taken] if taken < len(self._by_kind[kind]) else None

    def _is_ready(self, task: Operation) -> bool:
        return _key(task) in (self._activations if task.kind is Kind.FORWARD else self._gradients)

    def _early_backward(self) -> Operation | None:
        backward = self._first(Kind.BACKWARD)
        if backward is None or _key(backward) not in self._gradients:
            return None
        return self._first(Kind.RECOMPUTE) if _key(backward) in self._recomputed else backward

    def _early_forward(self) -> Operation | None:
        forward = self._first(Kind.FORWARD)
        if forward is None or _key(forward) not in self._activations:
            return None
        enters = forward.micro_batch not in self._in_flight
        if enters and self._window is not None and len(self._in_flight) >= self._window:
            return None
        return forward

    def _take(self, task: Operation) -> None:
        self._num_taken[task.kind] += 1
        self._remaining -= 1
        micro_batch = task.micro_batch
        if task.kind is Kind.FORWARD:
            self._in_flight[micro_batch] = self._in_flight.get(micro_batch, 0) + 1
            if _key(task) in self._last_hop:
                self._gradients.add(_key(task))
        elif task.kind is Kind.RECOMPUTE:
            self._held = self._first(Kind.BACKWARD)
        else:
            self._held = None
            self._in_flight[micro_batch] -= 1
            if not self._in_flight[micro_batch]:
                del self._in_flight[micro_batch]


_Key = tuple[int, int]  # (stage, micro-batch): unique, since a micro-batch has one path


def _key(task: Operation) -> _Key:
    return task.stage, task.micro_batch


def peak_in_flight(order: Sequence[Operation]) -> int:
    """The most micro-batches that are between forward and backward at once, if the order is followed."""
    open_hops: dict[int, int] = {}
    peak = 0
    for task in order:
        if task.kind is Kind.FORWARD:
            open_hops[task.micro_batch] = open_hops.get(task.micro_batch, 0) + 1
            peak = max(peak, len(open_hops))
        elif task.kind is Kind.BACKWARD:
            open_hops[task.micro_batch] -= 1
            if not open_hops[task.micro_batch]:
                del open_hops[task.micro_batch]
    return peak


def check_order(plan: Plan, worker: int, order: Sequence[Operation]) -> None:
    """Raises `InvalidOrder` unless `order` is its work: each F and B once, F before B, R just before B."""
    work = {
        (stage, micro_batch)
        for path in plan.paths
        for stage, hop in enumerate(path.hops)
        if hop.worker == worker
        for micro_batch in path.micro_batches
    }
    done: dict[Kind, set[_Key]] = {kind: set() for kind in Kind}
    for place, task in enumerate(order):
        where = f"worker {worker}, operation {place} ({task})"
        if task.kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
            raise InvalidOrder(f"{where}: only F, R and B can be run")
        if _key(task) not in work or _key(task) in done[task.kind]:
            raise InvalidOrder(f"{where}: it is no work of this worker, or occurs twice")
        if task.kind is not Kind.FORWARD and _key(task) not in done[Kind.FORWARD]:
            raise InvalidOrder(f"{where}: its forward comes later")
        follows = order[place + 1] if place + 1 < len(order) else None
        if task.kind is Kind.RECOMPUTE and follows != Operation(task.stage, Kind.BACKWARD, task.micro_batch):
            raise InvalidOrder(f"{where}: its backward must follow directly, or it could wait for ever")
        done[task.kind].add(_key(task))
    if len(done[Kind.FORWARD]) < len(work) or len(done[Kind.BACKWARD]) < len(work):
        raise InvalidOrder(
            f"worker {worker}: the order leaves out some of its {2 * len(work)} forwards and backwards"
        )
