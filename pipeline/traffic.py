"""The messages of a step: which worker sends what to whom, in an order fixed before the step begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .operations import Kind, Operation
from .plan import Plan
from .schedules import Orders, orders


class Message(NamedTuple):
    """A message between two hops on different workers.

    `kind` F carries activations, B gradients; `stage` is the hop that consumes it, `peer` the other worker.
    """

    peer: int
    kind: Kind
    micro_batch: int
    stage: int

    @property
    def operation(self) -> Operation:
        """The receiver's operation whose input this is (see `Dispatcher.arrived`)."""
        return Operation(self.stage, self.kind, self.micro_batch)


@dataclass(frozen=True, slots=True)
class Traffic:
    """One worker's messages of a step.

    For each (peer, kind), the messages in `sends` are the peer's `receives`, in the same order. F and B need
    separate channels, because their order relative to each other is not fixed.
    """

    sends: list[Message] = field(default_factory=list[Message])
    receives: list[Message] = field(default_factory=list[Message])


def messages(plan: Plan, all_orders: Orders) -> tuple[Traffic, ...]:
    """The traffic of every worker. Consecutive hops on the same worker need no message."""
    traffic = tuple(Traffic() for _ in range(plan.num_workers))
    for worker, order in enumerate(all_orders):
        for task in order:
            target = output_of(plan, task)
            if target is None or target[0] == worker:
                continue
            peer, fed = target
            traffic[worker].sends.append(Message(peer, fed.kind, fed.micro_batch, fed.stage))
            traffic[peer].receives.append(Message(worker, fed.kind, fed.micro_batch, fed.stage))
    return traffic


def own_part(plan: Plan, worker: int) -> tuple[tuple[Operation, ...], Traffic]:
    """One worker's operations and messages: its rows of `orders` and `messages`, without most of the others.

    Only its own order and those of its peers are written down; the peers' say when they send to it.
    """
    all_orders = orders(plan, only={worker, *_peers(plan, worker)})
    return all_orders[worker], messages(plan, all_orders)[worker]


def _peers(plan: Plan, worker: int) -> Iterator[int]:
    """The workers that exchange messages with `worker`."""
    for path in plan.paths:
        for hop, following in itertools.pairwise(path.hops):
            if worker in (hop.worker, following.worker):
                yield from (hop.worker, following.worker)


def output_of(plan: Plan, task: Operation) -> tuple[int, Operation] | None:
    """The worker and operation that need `task`'s result; None if none does (R, W, last F, first B or I).

    Of gradients that is a B, also where the receiver's backward is an I and a W.
    """
    hops = plan.path_of(task.micro_batch).hops
    if task.kind is Kind.FORWARD and task.stage + 1 < len(hops):
        stage = task.stage + 1
    elif task.kind in (Kind.BACKWARD, Kind.INPUT) and task.stage > 0:
        stage = task.stage - 1
    else:
        return None
    kind = Kind.FORWARD if task.kind is Kind.FORWARD else Kind.BACKWARD
    return hops[stage].worker, Operation(stage, kind, task.micro_batch)
