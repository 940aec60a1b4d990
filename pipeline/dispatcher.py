"""The dispatcher: gives a worker its operations of a step, one at a time (see `policy` for the rules)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .operations import Kind, Operation
from .plan import Plan
from .policy import FORWARD, NOTHING, RECOMPUTE, WEIGHT, decide
from .schedules import InvalidOrder, orders


class Dispatcher:
    """Decides what one worker runs next. Deterministic: answers depend only on the calls made so far.

    `order` is the worker's static order; by default that of the plan's schedule (computed for the whole plan:
    with many workers, call `orders` once and pass each its row). A dispatcher serves one step; `reset` begins
    another. Raises `InvalidOrder` unless the order has each of the worker's operations once, F before B or I,
    I before W, and R directly before its B.
    """

    def __init__(self, plan: Plan, worker: int, order: Sequence[Operation] | None = None) -> None:
        order = tuple(orders(plan)[worker] if order is None else order)
        check_order(plan, worker, order)
        self._forwards = [task for task in order if task.kind is Kind.FORWARD]
        self._backwards = [task for task in order if task.kind in (Kind.BACKWARD, Kind.INPUT)]
        self._weights = [task for task in order if task.kind is Kind.WEIGHT]
        recomputations = {_key(task): task for task in order if task.kind is Kind.RECOMPUTE}
        self._num_tasks = len(order)
        self._forward_place = {_key(task): place for place, task in enumerate(self._forwards)}
        self._backward_place = {_key(task): place for place, task in enumerate(self._backwards)}
        # Indexed by place among the forwards, or the backwards. The last forward is a sentinel.
        self._is_recomputed = [*(_key(task) in recomputations for task in self._forwards), False]
        self._recomputation = [recomputations.get(_key(task)) for task in self._backwards]
        self._ahead = _forwards_ahead(order)
        self._enters = [*(_enters(plan, worker, task) for task in self._forwards), False]
        self._is_split = [task.kind is Kind.INPUT for task in self._backwards]
        leaving = _leaving(order)
        self._leaves = [task in leaving for task in self._backwards]
        self._leaves_at_weight = [task in leaving for task in self._weights]
        self._is_last_hop = [_is_last_hop(plan, task) for task in self._forwards]
        window = plan.window_of(worker)
        self._window = len(order) if window is None else window
        if plan.schedule.limits_itself:
            # Bounded memory is the point of 1F1B: running ahead may not exceed what its own order needs.
            self._window = min(peak_in_flight(order), self._window)
        self.reset()

    def reset(self) -> None:
        """Begin a step, in which nothing has run and nothing has arrived."""
        self._remaining = self._num_tasks
        self._num_forwards = self._num_backwards = self._num_weights = self._in_flight = 0
        self._weights_left = 0  # backwards that are over but for their W
        self._is_held = False  # the recomputation of the first backward was the last operation
        self._activations = [*(task.stage == 0 for task in self._forwards), False]
        self._gradients = [False] * len(self._backwards)

    @property
    def remaining(self) -> int:
        """Number of operations not yet taken."""
        return self._remaining

    def recomputes(self, micro_batch: int, stage: int) -> bool:
        """Whether an R comes between this F and its B, so that only the hop's inputs are kept until the R."""
        place = self._forward_place.get((stage, micro_batch))
        return place is not None and self._is_recomputed[place]

    def arrived(self, operation: Operation) -> None:
        """Note that the input of `operation` has arrived: activations of an F, the gradient of a B.

        Call it for inputs from peers and from hops on the same worker alike; where a backward is an I and a
        W, the gradient is that of a B. The F of stage 0 and the B of a path's last hop need no call. Raises
        `InvalidOrder` for an operation that the worker does not run or that takes no input.
        """
        key = operation.stage, operation.micro_batch
        if operation.kind is Kind.FORWARD and key in self._forward_place:
            self._activations[self._forward_place[key]] = True
        elif operation.kind is Kind.BACKWARD and key in self._backward_place:
            self._gradients[self._backward_place[key]] = True
        else:
            raise InvalidOrder(f"an input came for {operation}, which this worker does not run")

    def next(self) -> Operation | None:
        """Take the operation to run now; call it when the one before has finished.

        None if nothing may run before another input arrives, or nothing is left.
        """
        forward, backward = self._num_forwards, self._num_backwards
        if backward == len(self._backwards):
            return self._take_weight() if self._weights_left else None
        recomputation = self._recomputation[backward]
        kind = decide(
            is_forward_planned=forward < self._ahead[backward],
            is_held=self._is_held,
            is_forward_here=self._activations[forward],
            is_admitted=self._in_flight < self._window or not self._enters[forward],
            is_forward_recomputed=self._is_recomputed[forward],
            is_gradient_here=self._gradients[backward],
            is_backward_recomputed=recomputation is not None,
            is_weight_left=self._weights_left > 0,
        )
        if kind == NOTHING:
            return None
        if kind == WEIGHT:
            return self._take_weight()
        self._remaining -= 1
        if kind == FORWARD:
            return self._take_forward(forward)
        self._is_held = kind == RECOMPUTE
        if self._is_held:
            return recomputation
        self._num_backwards += 1
        if self._is_split[backward]:
            self._weights_left += 1
        else:
            self._in_flight -= self._leaves[backward]
        return self._backwards[backward]

    def _take_weight(self) -> Operation:
        place = self._num_weights
        self._remaining -= 1
        self._num_weights += 1
        self._weights_left -= 1
        self._in_flight -= self._leaves_at_weight[place]
        return self._weights[place]

    def _take_forward(self, place: int) -> Operation:
        task = self._forwards[place]
        self._num_forwards += 1
        self._in_flight += self._enters[place]
        if self._is_last_hop[place]:
            self._gradients[self._backward_place[_key(task)]] = True
        return task


def _is_last_hop(plan: Plan, task: Operation) -> bool:
    return task.stage == len(plan.path_of(task.micro_batch).hops) - 1


def _forwards_ahead(order: Sequence[Operation]) -> list[int]:
    """The number of forwards before each backward, or I."""
    ahead: list[int] = []
    num_forwards = 0
    for task in order:
        num_forwards += task.kind is Kind.FORWARD
        if task.kind in (Kind.BACKWARD, Kind.INPUT):
            ahead.append(num_forwards)
    return ahead


def _enters(plan: Plan, worker: int, task: Operation) -> bool:
    """Whether this is the micro-batch's first visit to the worker, which counts against the window."""
    return all(hop.worker != worker for hop in plan.path_of(task.micro_batch).hops[: task.stage])


_Key = tuple[int, int]  # (stage, micro-batch): unique, since a micro-batch has one path


def _key(task: Operation) -> _Key:
    return task.stage, task.micro_batch


def peak_in_flight(order: Sequence[Operation]) -> int:
    """The most micro-batches that count against the window at once if the order is followed."""
    leaving, in_flight, peak = _leaving(order), set[int](), 0
    for task in order:
        if task.kind is Kind.FORWARD:
            in_flight.add(task.micro_batch)
            peak = max(peak, len(in_flight))
        elif task in leaving:
            in_flight.remove(task.micro_batch)
    return peak


def _leaving(order: Iterable[Operation]) -> set[Operation]:
    """The operation with which each micro-batch leaves the window (see `arrays.Hop.leaves`)."""
    last: dict[int, Operation] = {}
    for task in order:
        if task.kind in (Kind.BACKWARD, Kind.WEIGHT):
            other = last.setdefault(task.micro_batch, task)
            if (task.kind is not Kind.WEIGHT, task.stage) < (other.kind is not Kind.WEIGHT, other.stage):
                last[task.micro_batch] = task
    return set(last.values())


def check_order(plan: Plan, worker: int, order: Sequence[Operation]) -> None:
    """Raise `InvalidOrder` unless `order` has the worker's F and B once each, F before B, R just before B; or
    I and later W for B."""
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
        if _key(task) not in work or _key(task) in done[task.kind]:
            raise InvalidOrder(f"{where}: it is no work of this worker, or occurs twice")
        if task.kind is not Kind.FORWARD and _key(task) not in done[Kind.FORWARD]:
            raise InvalidOrder(f"{where}: its forward comes later")
        if task.kind is Kind.WEIGHT and _key(task) not in done[Kind.INPUT]:
            raise InvalidOrder(f"{where}: its I comes later, or never")
        if task.kind is Kind.INPUT and _key(task) in done[Kind.BACKWARD]:
            raise InvalidOrder(f"{where}: it has had a whole backward")
        follows = order[place + 1] if place + 1 < len(order) else None
        if task.kind is Kind.RECOMPUTE and follows != Operation(task.stage, Kind.BACKWARD, task.micro_batch):
            raise InvalidOrder(f"{where}: its backward must follow directly, or it could wait for ever")
        done[task.kind].add(_key(task))
    backwards = len(done[Kind.BACKWARD]) + len(done[Kind.INPUT])
    if done[Kind.INPUT] != done[Kind.WEIGHT]:
        raise InvalidOrder(f"worker {worker}: an I needs its W, sooner or later")
    if len(done[Kind.FORWARD]) < len(work) or backwards < len(work):
        raise InvalidOrder(
            f"worker {worker}: the order leaves out some of its {2 * len(work)} forwards and backwards"
        )
