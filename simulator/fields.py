"""What the engine knows of a component's workers, hops, operations, links and messages, as arrays of records.

See `pipeline.arrays`. Times are in whole nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..pipeline.arrays import NONE, Array, Entry, Hop, Turn, Worker

NEVER = 1 << 62  # a time that does not come


@dataclass(slots=True)
class SimWorker(Worker):
    window: int = NEVER
    """Micro-batches in flight from which on none enters ahead of its turn."""
    first_link: int = NONE
    """Of those that come to it; the others follow by `next_here`."""
    clock: int = 0
    """Up to there it is decided what the worker does."""
    wake_at: int = 0
    """The first known moment, not before its clock, at which it may have something to do."""
    running: int = NONE
    """The operation that ends at its clock."""
    is_held: int = 0
    """1: the recomputation of its first backward was its last operation."""
    num_forwards: int = 0
    num_backwards: int = 0
    num_in_flight: int = 0
    busy_ns: int = 0
    resident_bytes: int = 0
    """Beyond its state."""
    peak_bytes: int = 0


@dataclass(slots=True)
class SimHop(Hop):
    activation_link: int = NONE
    """To the next hop; `NONE` if that is on the same worker, or there is none."""
    gradient_link: int = NONE
    """To the hop before."""
    first_arrival: int = 0
    """Its `num_turns` records among those of all hops."""
    input_bytes: int = 0
    gradient_bytes: int = 0
    num_forwards: int = 0
    num_backwards: int = 0
    num_inputs_counted: int = 0
    """As resident."""
    num_gradients_counted: int = 0
    last_forward_ns: int = 0
    """When the last one began."""
    last_backward_ns: int = 0


@dataclass(slots=True)
class SimOperation:
    """What a hop does (`pipeline.arrays.operation` numbers it)."""

    hop: int = NONE
    action: int = 0
    takes_ns: int = 0
    running_bytes: int = 0
    """While it runs, beyond what was there when it began."""
    added_bytes: int = 0
    """After it, beyond what was there when it began."""


@dataclass(slots=True)
class Link:
    """From a hop to a neighbour on another worker."""

    wire: int = NONE
    carries_gradients: int = 0
    transfer_ns: int = 0
    """A message occupies the wire for so long."""
    latency_ns: int = 0
    jitter_ns: int = 0
    """Mean."""
    stream: int = 0
    """Of random numbers, and the number of its first message there."""
    first_message: int = 0
    sender: int = NONE
    lead_ns: int = 0
    """The least from the start of an operation at the sender to the arrival of its message."""
    next_here: int = NONE
    """The next link to the same worker."""


@dataclass(slots=True)
class Wire:
    """From one worker to another. Messages of one kind keep their order."""

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
    """When the k-th backward's recomputation began, and the backward."""
    backward_ns: int = NONE


class State(NamedTuple):
    """A component while it is played."""

    workers: Array[SimWorker]
    hops: Array[SimHop]
    operations: Array[SimOperation]
    links: Array[Link]
    wires: Array[Wire]
    arrivals: Array[Arrival]
    turns: Array[Turn]
    entries: Array[Entry]
