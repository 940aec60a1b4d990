"""The engine: runs the operations of a component of a plan in virtual time, under the next-operation policy.

Every worker has a clock, up to which its operations are decided. It may choose its next operation if no
unknown message can arrive by then: while its clock is below that of every worker that sends to it plus the
least time from the start of an operation there to the arrival of its message. Such a conservative simulation
(Chandy and Misra, CACM 24, 1981) needs no queue of events, because when an operation starts, its end and the
arrival of its message are known. The result does not depend on which worker is advanced first. If all workers
are idle until a known arrival, all clocks jump to the first such moment.

At one instant, operations end first, then messages arrive, then workers choose. Every operation takes at
least a nanosecond.
"""

from __future__ import annotations

from ..pipeline.arrays import NONE
from ..pipeline.policy import (
    BACKWARD,
    FORWARD,
    FORWARD_DISCARD,
    INPUT,
    NOTHING,
    RECOMPUTE,
    WEIGHT,
    decide,
)
from .fields import NEVER, Link, SimHop, SimWorker, State
from .rng import exponential


def run(state: State, seed: int) -> None:
    """Run every operation."""
    while True:
        num_started = 0
        for worker in state.workers:
            num_started += _advance(state, worker, seed)
        if num_started == 0 and not _jump_to_next_event(state):
            break


def _advance(state: State, worker: SimWorker, seed: int) -> int:
    """Let a worker choose while no unknown message can reach it; return how many operations it starts."""
    num_started = 0
    horizon = _horizon(state, worker)
    while worker.clock < horizon:
        if worker.running != NONE:
            _end_operation(state, worker)
        if worker.num_backwards == worker.num_entries and worker.num_weights_left == 0:
            worker.clock = worker.wake_at = NEVER
            break
        chosen = _choose(state, worker)
        if chosen == NONE:
            worker.clock = min(worker.wake_at, horizon)
        else:
            _start_operation(state, worker, chosen, seed)
            num_started += 1
    return num_started


def _horizon(state: State, worker: SimWorker) -> int:
    """The time before which no unknown message can arrive."""
    horizon, index = NEVER, worker.first_link
    while index != NONE:
        link = state.links[index]
        horizon = min(horizon, state.workers[link.sender].clock + link.lead_ns)
        index = link.next_here
    return horizon


def _jump_to_next_event(state: State) -> bool:
    """Set all clocks to the next moment when some worker may start an operation; False if there is none."""
    next_event = NEVER
    for worker in state.workers:
        next_event = min(next_event, worker.wake_at)
    for worker in state.workers:
        worker.clock = max(worker.clock, next_event)
    return next_event < NEVER


def _choose(state: State, worker: SimWorker) -> int:
    """The operation that a worker starts now; or `NONE`, and `wake_at` is the next moment to ask again."""
    if worker.num_backwards == worker.num_entries:
        return state.entries[worker.first_entry + worker.num_weights].weight
    entry = state.entries[worker.first_entry + worker.num_backwards]
    is_backward_recomputed = state.operations[entry.backward].action == RECOMPUTE
    hop = state.hops[state.operations[entry.backward].hop]
    gradient_at = state.arrivals[hop.first_arrival + hop.num_backwards].gradient_at
    forward, is_forward_recomputed, input_at, enters = NONE, False, NEVER, 1
    if worker.num_forwards < worker.num_entries:
        forward = state.entries[worker.first_entry + worker.num_forwards].forward
        is_forward_recomputed = state.operations[forward].action == FORWARD_DISCARD
        hop = state.hops[state.operations[forward].hop]
        input_at = 0  # a first hop's input is samples, which are always there
        if hop.before != NONE:
            input_at = state.arrivals[hop.first_arrival + hop.num_forwards].input_at
        enters = hop.enters
    action = decide(
        worker.num_forwards < entry.forwards_before,
        worker.is_held != 0,
        input_at <= worker.clock,
        worker.num_in_flight < worker.window or enters == 0,
        is_forward_recomputed,
        gradient_at <= worker.clock,
        is_backward_recomputed,
        worker.num_weights_left > 0,
    )
    if action == FORWARD:
        return forward
    if action == WEIGHT:
        return state.entries[worker.first_entry + worker.num_weights].weight
    if action != NOTHING:  # `entry.backward` is a RECOMPUTE if there is one; its BACKWARD has the next number
        return entry.backward + worker.is_held
    worker.wake_at = NEVER
    if input_at > worker.clock:
        worker.wake_at = input_at
    if gradient_at > worker.clock:
        worker.wake_at = min(worker.wake_at, gradient_at)
    return NONE


def _start_operation(state: State, worker: SimWorker, chosen: int, seed: int) -> None:
    """Start an operation; its end and the arrival of its result are known at once."""
    operation, start = state.operations[chosen], worker.clock
    hop, end = state.hops[operation.hop], start + operation.takes_ns
    worker.running = chosen
    worker.busy_ns += end - start
    worker.clock = worker.wake_at = end
    if operation.action == RECOMPUTE:
        worker.is_held = 1
        state.arrivals[hop.first_arrival + hop.num_backwards].recompute_ns = start
    elif operation.action == WEIGHT:
        worker.num_weights += 1
        worker.num_weights_left -= 1
        worker.num_in_flight -= hop.leaves
        state.arrivals[hop.first_arrival + hop.num_weights].weight_ns = hop.last_weight_ns = start
        hop.num_weights += 1
    elif operation.action == BACKWARD or operation.action == INPUT:
        worker.is_held = 0
        worker.num_backwards += 1
        if operation.action == INPUT:
            worker.num_weights_left += 1
        else:
            worker.num_in_flight -= hop.leaves
        _pass_gradient(state, hop, start, end, seed)
    else:
        worker.num_forwards += 1
        worker.num_in_flight += hop.enters
        _pass_activation(state, hop, start, end, seed)


def _pass_activation(state: State, hop: SimHop, start: int, end: int, seed: int) -> None:
    """Record a forward, and when its activations arrive at the next hop."""
    turn = hop.num_forwards
    state.arrivals[hop.first_arrival + turn].forward_ns = hop.last_forward_ns = start
    hop.num_forwards += 1
    if hop.after == NONE:
        backwards_before = state.turns[hop.first_turn + turn].backwards_before
        state.arrivals[hop.first_arrival + backwards_before].gradient_at = end
        return
    after, arrival = state.hops[hop.after], end
    if hop.activation_link != NONE:
        arrival = _send(state, state.links[hop.activation_link], turn, end, seed)
    state.arrivals[after.first_arrival + turn].input_at = arrival
    _wake(state.workers[after.worker], arrival)


def _pass_gradient(state: State, hop: SimHop, start: int, end: int, seed: int) -> None:
    """Record a backward, and when its gradients arrive at the hop before."""
    turn = hop.num_backwards
    state.arrivals[hop.first_arrival + turn].backward_ns = hop.last_backward_ns = start
    hop.num_backwards += 1
    if hop.before == NONE:
        return
    before, arrival = state.hops[hop.before], end
    if hop.gradient_link != NONE:
        arrival = _send(state, state.links[hop.gradient_link], turn, end, seed)
    state.arrivals[before.first_arrival + turn].gradient_at = arrival
    _wake(state.workers[before.worker], arrival)


def _send(state: State, link: Link, turn: int, ready: int, seed: int) -> int:
    """Send a message that can leave at `ready`; return when it arrives."""
    wire = state.wires[link.wire]
    wire.free_at = max(ready, wire.free_at) + link.transfer_ns
    arrival = wire.free_at + link.latency_ns
    if link.jitter_ns:
        arrival += exponential(seed, link.stream, link.first_message + turn, link.jitter_ns)
        if link.carries_gradients:
            arrival = wire.last_gradient_at = max(arrival, wire.last_gradient_at)
        else:
            arrival = wire.last_activation_at = max(arrival, wire.last_activation_at)
    return arrival


def _wake(worker: SimWorker, arrival: int) -> None:
    """Tell an idle worker of an arrival; a running one chooses anyway when its operation ends."""
    if worker.running == NONE:
        worker.wake_at = min(worker.wake_at, max(arrival, worker.clock))


def _end_operation(state: State, worker: SimWorker) -> None:
    """End the running operation, and count memory: arrivals before now, what it held and what it leaves."""
    index = worker.first_hop
    while index != NONE:
        hop = state.hops[index]
        if hop.before != NONE:  # a first hop's inputs are samples, counted elsewhere
            while (
                hop.num_inputs_counted < hop.num_turns
                and state.arrivals[hop.first_arrival + hop.num_inputs_counted].input_at < worker.clock
            ):
                hop.num_inputs_counted += 1
                worker.resident_bytes += hop.input_bytes
        if hop.after != NONE:
            while (
                hop.num_gradients_counted < hop.num_turns
                and state.arrivals[hop.first_arrival + hop.num_gradients_counted].gradient_at < worker.clock
            ):
                hop.num_gradients_counted += 1
                worker.resident_bytes += hop.gradient_bytes
        index = hop.next_here
    ended = state.operations[worker.running]
    worker.peak_bytes = max(worker.peak_bytes, worker.resident_bytes + ended.running_bytes)
    worker.resident_bytes += ended.added_bytes
    worker.running = NONE
