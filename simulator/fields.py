"""The engine's state: a component's workers, hops, operations, links and messages, as arrays of records.

See `pipeline.arrays`. Times are in whole nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..pipeline.arrays import NONE, Array, Entry, ForwardTurn, Hop, Worker

NEVER = 1 << 62  # later than any time


@dataclass(slots=True)
class SimWorker(Worker):
    window: int = NEVER
    """A micro-batch enters ahead of its turn only while fewer than this are in flight."""
    first_link: int = NONE
    """Index of its first incoming link; `next_here` of each link gives the next one."""
    clock: int = 0
    """The time up to which its operations are decided."""
    wake_at: int = 0
    """The first known moment, not before its clock, at which it may have something to do."""
    running: int = NONE
    """The operation that ends at its clock."""
    is_held: int = 0
    """1 if its last operation was the recomputation of its first remaining backward."""
    num_forwards: int = 0
    num_backwards: int = 0
    num_weights: int = 0
    num_weights_left: int = 0
    """Number of backwards that are over but for their W."""
    num_in_flight: int = 0
    busy_ns: int = 0
    resident_bytes: int = 0
    """Memory held beyond its state."""
    peak_bytes: int = 0


@dataclass(slots=True)
class SimHop(Hop):
    activation_link: int = NONE
    """Link to the next hop; `NONE` if that is on the same worker, or there is none."""
    gradient_link: int = NONE
    """Link to the hop before; `NONE` likewise."""
    first_arrival: int = 0
    """Index of the first of its `num_turns` `Arrival` records."""
    input_bytes: int = 0
    gradient_bytes: int = 0
    num_forwards: int = 0
    num_backwards: int = 0
    num_weights: int = 0
    num_inputs_counted: int = 0
    """Number of inputs, and below of gradients, already counted as resident memory."""
    num_gradients_counted: int = 0
    last_forward_ns: int = 0
    """When the last forward began."""
    last_backward_ns: int = 0
    last_weight_ns: int = 0


@dataclass(slots=True)
class SimOperation:
    """An operation of a hop (`pipeline.arrays.operation` numbers it), for each of its micro-batches."""

    hop: int = NONE
    action: int = 0
    takes_ns: int = 0
    running_bytes: int = 0
    """Memory that it adds while it runs."""
    added_bytes: int = 0
    """Memory that it leaves; negative if it frees more."""


@dataclass(slots=True)
class Link:
    """Connects a hop to a neighbour on another worker."""

    wire: int = NONE
    carries_gradients: int = 0
    transfer_ns: int = 0
    """How long a message occupies the wire."""
    latency_ns: int = 0
    jitter_ns: int = 0
    """Mean jitter."""
    stream: int = 0
    """Its stream of random numbers, and (`first_message`) the number of its first message there."""
    first_message: int = 0
    sender: int = NONE
    lead_ns: int = 0
    """The least time from the start of an operation at the sender to the arrival of its message."""
    next_here: int = NONE
    """The next link to the same worker."""


@dataclass(slots=True)
class Wire:
    """One direction between two workers. Messages of one kind keep their order."""

    free_at: int = 0
    last_activation_at: int = 0
    last_gradient_at: int = 0


@dataclass(slots=True)
class Arrival:
    """The k-th input and the k-th gradient of a hop, and what follows from them."""

    input_at: int = NEVER
    forward_ns: int = NONE
    """When the k-th forward began."""
    gradient_at: int = NEVER
    recompute_ns: int = NONE
    """When the k-th backward's recomputation began, and below (`backward_ns`) the backward itself, or its I,
    and its W."""
    backward_ns: int = NONE
    weight_ns: int = NONE


class State(NamedTuple):
    """A component while it is simulated."""

    workers: Array[SimWorker]
    hops: Array[SimHop]
    operations: Array[SimOperation]
    links: Array[Link]
    wires: Array[Wire]
    arrivals: Array[Arrival]
    turns: Array[ForwardTurn]
    entries: Array[Entry]
