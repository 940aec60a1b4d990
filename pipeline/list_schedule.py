"""List scheduling in unit time: Varuna's three rules (§3.2), and 1F1B, which adds a window by depth.

Time runs in units of T_f: a forward or a recomputation takes one, a backward two (one at a frozen hop, where
it computes nothing), an I or a W one. At each unit every idle worker takes the first of these that it can:
1. the backward of the micro-batch that it has just recomputed, and nothing else before it (rule 2);
2. a backward, or I, whose gradient has arrived;
3. a recomputation that is due: the next hop's backward ends one unit from now, or has ended (rule 1);
4. a forward. So backwards come before forwards (rule 3);
5. the oldest W.

Where paths cross on a worker, as in a rerouted plan, more gradients may arrive than it can take, and its last
forwards would wait for them all; then it would stand still until theirs come back. So before 2 comes there
a forward whose gradient could not be back before the backwards are done that the worker has begun with.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import NONE, Array, Entry, ForwardTurn, Hop, Worker, operation
from .policy import BACKWARD, FORWARD, FORWARD_DISCARD, INPUT, RECOMPUTE, WEIGHT


@dataclass(slots=True)
class ListHop(Hop):
    window: int = 0
    """A micro-batch enters only while fewer than this are in flight on the worker."""
    recomputes: int = 0
    """0 or 1."""
    away: int = 0
    """Units from the end of a forward until its gradient may be there, if no later hop lets it wait."""
    num_offered: int = 0
    """Number of forwards that can begin or have begun."""
    num_forwards: int = 0
    num_gradients: int = 0
    """Number of gradients that have arrived, counted at hops that recompute."""
    num_backwards: int = 0


@dataclass(slots=True)
class ListWorker(Worker):
    num_forwards: int = 0
    num_backwards: int = 0
    num_in_flight: int = 0
    most_in_flight: int = 0
    num_ready: int = 0
    """Backwards queued because their gradient came, and (`_taken`) how many of them have begun."""
    num_ready_taken: int = 0
    num_due: int = 0
    """The same of recomputations."""
    num_due_taken: int = 0
    num_split: int = 0
    """The same of W: backwards that have done their I, and how many of them have begun their W."""
    num_weights: int = 0
    held: int = NONE
    """The hop whose recomputed micro-batch waits for its backward."""
    hop: int = NONE
    """The hop and action that run, and for how many more units."""
    action: int = 0
    units_left: int = 0


@dataclass(slots=True)
class Queued:
    """One place in each of a worker's queues of hops; the worker has as many as it has entries."""

    ready: int = NONE
    due: int = NONE
    split: int = NONE


def list_schedule(
    workers: Array[ListWorker],
    hops: Array[ListHop],
    turns: Array[ForwardTurn],
    entries: Array[Entry],
    queues: Array[Queued],
) -> None:
    """Write the order of all operations into `entries`. A path's backwards have the order of its forwards."""
    num_left = 0
    for hop in hops:
        num_left += (2 + hop.is_split) * hop.num_turns
        hop.num_offered = 1 if hop.before == NONE else 0
        for turn in range(hop.num_turns):
            turns[hop.first_turn + turn].backwards_before = turn
        if hop.after == NONE:
            _measure_away(hops, hop)
    while num_left:
        num_left -= _start_all(workers, hops, turns, entries, queues)
        _pass_unit(workers, hops, queues)


def _measure_away(hops: Array[ListHop], last: ListHop) -> None:
    """Set `away` of the hops of the path that ends at `last`."""
    units, index = 1 + _backward_units(last), last.before
    while index != NONE:
        hop = hops[index]
        hop.away, units, index = units, units + 1 + _backward_units(hop), hop.before


def _backward_units(hop: ListHop) -> int:
    """Until the hop before has its gradient: of a backward, or an I."""
    return 2 - hop.is_frozen - hop.is_split


def _start_all(
    workers: Array[ListWorker],
    hops: Array[ListHop],
    turns: Array[ForwardTurn],
    entries: Array[Entry],
    queues: Array[Queued],
) -> int:
    """Let idle workers begin an operation; return how many began, recomputations apart.

    At least one begins, or something runs already.
    """
    num_started, is_idle = 0, True
    for worker in workers:
        if worker.units_left == 0:
            num_started += _start(worker, hops, turns, entries, queues)
        if worker.units_left:
            is_idle = False
    return _force_forward(workers, hops, turns, entries) if is_idle else num_started


def _start(
    worker: ListWorker,
    hops: Array[ListHop],
    turns: Array[ForwardTurn],
    entries: Array[Entry],
    queues: Array[Queued],
) -> int:
    """Let an idle worker begin an operation; return 1 if it does, and that is no recomputation."""
    if worker.held != NONE:
        if hops[worker.held].num_gradients == hops[worker.held].num_backwards:
            return 0
        _backward(worker, hops, worker.held, entries)
        worker.held = NONE
        return 1
    index = _urgent_forward(worker, hops, turns)
    if index != NONE:
        _forward(worker, hops, index, entries)
        return 1
    if worker.num_ready_taken < worker.num_ready:
        index = queues[worker.first_entry + worker.num_ready_taken].ready
        worker.num_ready_taken += 1
        _backward(worker, hops, index, entries)
        return 1
    if worker.num_due_taken < worker.num_due:
        worker.held = queues[worker.first_entry + worker.num_due_taken].due
        worker.num_due_taken += 1
        worker.hop, worker.action, worker.units_left = worker.held, RECOMPUTE, 1
        return 0
    index = _next_forward(worker, hops, turns)
    if index != NONE:
        _forward(worker, hops, index, entries)
        return 1
    if worker.num_weights < worker.num_split:
        _weight(worker, queues[worker.first_entry + worker.num_weights].split, entries)
        return 1
    return 0


def _urgent_forward(worker: ListWorker, hops: Array[ListHop], turns: Array[ForwardTurn]) -> int:
    """The forward that comes before backwards on a worker where paths cross; `NONE` if there is none."""
    if hops[worker.first_hop].next_here == NONE:
        return NONE
    index = _next_forward(worker, hops, turns)
    if index == NONE or 2 * (worker.num_forwards - worker.num_backwards) >= hops[index].away + 2:
        return NONE
    return index


def _next_forward(worker: ListWorker, hops: Array[ListHop], turns: Array[ForwardTurn]) -> int:
    """The hop whose next forward may run, the lowest micro-batch first; `NONE` if there is none."""
    entering = returning = NONE
    lowest_entering = lowest_returning = 0
    index = worker.first_hop
    while index != NONE:
        hop = hops[index]
        if hop.num_forwards < hop.num_offered:
            micro_batch = turns[hop.first_turn + hop.num_forwards].micro_batch
            if hop.enters and (entering == NONE or micro_batch < lowest_entering):
                entering, lowest_entering = index, micro_batch
            if not hop.enters and (returning == NONE or micro_batch < lowest_returning):
                returning, lowest_returning = index, micro_batch
        index = hop.next_here
    if entering != NONE and worker.num_in_flight >= hops[entering].window:
        entering = NONE
    if entering == NONE or returning == NONE:
        return max(entering, returning)
    return returning if lowest_returning < lowest_entering else entering


def _first_entering(worker: ListWorker, hops: Array[ListHop], turns: Array[ForwardTurn]) -> int:
    """The hop at which the lowest micro-batch could enter, whatever the window; `NONE` if there is none."""
    first, index = NONE, worker.first_hop
    while index != NONE:
        hop = hops[index]
        is_offered = hop.enters and hop.num_forwards < hop.num_offered
        if is_offered and (first == NONE or _micro_batch(hop, turns) < _micro_batch(hops[first], turns)):
            first = index
        index = hop.next_here
    return first


def _micro_batch(hop: ListHop, turns: Array[ForwardTurn]) -> int:
    """The micro-batch of the hop's next forward."""
    return turns[hop.first_turn + hop.num_forwards].micro_batch


def _force_forward(
    workers: Array[ListWorker], hops: Array[ListHop], turns: Array[ForwardTurn], entries: Array[Entry]
) -> int:
    """Admit the forward nearest to its path's end, where crossing paths have filled each other's windows."""
    best, best_stage, lowest = NONE, 0, 0
    for worker in workers:
        index = _first_entering(worker, hops, turns)
        if index == NONE:
            continue
        stage, before = 0, hops[index].before
        while before != NONE:
            stage, before = stage + 1, hops[before].before
        micro_batch = _micro_batch(hops[index], turns)
        if best == NONE or stage > best_stage or (stage == best_stage and micro_batch < lowest):
            best, best_stage, lowest = index, stage, micro_batch
    assert best != NONE, "work is left, none runs and none is ready"
    _forward(workers[hops[best].worker], hops, best, entries)
    return 1


def _forward(worker: ListWorker, hops: Array[ListHop], index: int, entries: Array[Entry]) -> None:
    hop = hops[index]
    entry = entries[worker.first_entry + worker.num_forwards]
    entry.forward = operation(index, FORWARD_DISCARD if hop.recomputes else FORWARD)
    worker.num_forwards += 1
    worker.num_in_flight += hop.enters
    worker.most_in_flight = max(worker.most_in_flight, worker.num_in_flight)
    hop.num_forwards += 1
    if hop.before == NONE and hop.num_offered < hop.num_turns:
        hop.num_offered += 1
    worker.hop, worker.action, worker.units_left = index, FORWARD, 1


def _backward(worker: ListWorker, hops: Array[ListHop], index: int, entries: Array[Entry]) -> None:
    hop = hops[index]
    entry = entries[worker.first_entry + worker.num_backwards]
    action = INPUT if hop.is_split else BACKWARD
    entry.backward = operation(index, RECOMPUTE if hop.recomputes else action)
    entry.forwards_before = worker.num_forwards
    worker.num_backwards += 1
    hop.num_backwards += 1
    worker.hop, worker.action, worker.units_left = index, action, _backward_units(hop)


def _weight(worker: ListWorker, index: int, entries: Array[Entry]) -> None:
    entry = entries[worker.first_entry + worker.num_weights]
    entry.weight = operation(index, WEIGHT)
    entry.weight_place = worker.num_forwards + worker.num_backwards
    worker.num_weights += 1
    worker.hop, worker.action, worker.units_left = index, WEIGHT, 1


def _pass_unit(workers: Array[ListWorker], hops: Array[ListHop], queues: Array[Queued]) -> None:
    for worker in workers:
        if worker.units_left == 0:
            continue
        worker.units_left -= 1
        hop = hops[worker.hop]
        if worker.units_left:  # a backward that ends one unit from now
            if hop.before != NONE and hops[hop.before].recomputes:
                receiver = workers[hops[hop.before].worker]
                queues[receiver.first_entry + receiver.num_due].due = hop.before
                receiver.num_due += 1
        elif worker.action == FORWARD:
            if hop.after != NONE:
                hops[hop.after].num_offered += 1
            else:
                _append_ready(worker, queues, worker.hop)
        elif worker.action == WEIGHT:
            worker.num_in_flight -= hop.leaves
        elif worker.action != RECOMPUTE:
            if hop.is_split:
                queues[worker.first_entry + worker.num_split].split = worker.hop
                worker.num_split += 1
            else:
                worker.num_in_flight -= hop.leaves
            if hop.before != NONE and hops[hop.before].recomputes:
                hops[hop.before].num_gradients += 1
            elif hop.before != NONE:
                _append_ready(workers[hops[hop.before].worker], queues, hop.before)


def _append_ready(worker: ListWorker, queues: Array[Queued], hop: int) -> None:
    queues[worker.first_entry + worker.num_ready].ready = hop
    worker.num_ready += 1
