"""Activations and gradients between workers: a thread for each peer and direction, in one fixed order.

For each directed pair of workers and each kind of message the order on the wire is known beforehand (see
`pipeline.traffic`): receives are posted ahead of need, and activations and gradients travel in separate
groups and cannot be confused.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Plan
from ...pipeline.traffic import Message, Traffic
from ..cutting.partition import Sections, Value
from .gloo import Group
from .interrupt import Interrupt, PeersLost
from .staging import Staged, Stager

_TENSORS_PER_MESSAGE = 64  # bounds the tags of one message
_AHEAD = 2  # receives posted on each lane: while one is handed over, the next is there for the wire

Tensors = dict[str, torch.Tensor]
_Marked = dict[str, Staged]
_Outbox = queue.SimpleQueue[tuple[Message, _Marked] | None]


def values_of(plan: Plan, sections: Sections, message: Message) -> tuple[Value, ...]:
    """What a message carries: activations cross the boundary where the consuming hop begins, gradients the
    one where it ends."""
    span = plan.path_of(message.micro_batch).hops[message.stage].range
    if message.kind is Kind.FORWARD:
        return sections.inputs_of(span.start)
    return tuple(value for value in sections.outputs_of(span.stop) if value.needs_grad)


class Lanes:
    """One worker's wires for one generation. Call `begin_step` before the first operation of each step."""

    def __init__(
        self,
        traffic: Traffic,
        values: Callable[[Message], tuple[Value, ...]],
        groups: Mapping[Kind, Group],
        interrupt: Interrupt,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._interrupt = interrupt
        self._device = device
        self._compute = Stager(device)
        self._arrived: queue.SimpleQueue[tuple[Operation, _Marked]] = queue.SimpleQueue()
        self._outgoing = {
            message.operation: (message, tuple(value.name for value in values(message)))
            for message in traffic.sends
        }
        self._starters: list[queue.SimpleQueue[bool]] = []
        self._outboxes: dict[tuple[int, Kind], _Outbox] = {}
        incoming: dict[tuple[int, Kind], list[tuple[Message, tuple[Value, ...]]]] = {}
        for message in traffic.receives:
            incoming.setdefault((message.peer, message.kind), []).append((message, values(message)))
        for (peer, kind), expected in incoming.items():
            self._start_receiver(peer, kind, expected)
        for peer, kind in sorted({(message.peer, message.kind) for message in traffic.sends}):
            self._start_sender(peer, kind)

    def begin_step(self) -> None:
        """Post the first receives of the next step."""
        for starter in self._starters:
            starter.put(True)

    def send(self, consumer: Operation, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue what `consumer` needs, as device tensors by value name; never blocks on the wire. They must
        not be written to afterwards: on the CPU the wire reads them where they are."""
        message, names = self._outgoing[consumer]
        marked = {name: self._compute.mark(tensors[name]) for name in names}
        self._outboxes[message.peer, message.kind].put((message, marked))

    def wait(self) -> None:
        """Block until something has arrived. Raises what tripped the interrupt."""
        self._interrupt.wait_for(lambda: not self._arrived.empty())

    def collect(self) -> list[tuple[Operation, Tensors]]:
        """What arrived since the last call: the operation that it enables, and its tensors on the
        device."""
        self._interrupt.check()
        items: list[tuple[Operation, Tensors]] = []
        while not self._arrived.empty():
            operation, marked = self._arrived.get()
            items.append((operation, {name: self._compute.take(staged) for name, staged in marked.items()}))
        return items

    def close(self) -> None:
        """Let the threads end; those that are blocked on a lost peer end with the process."""
        for starter in self._starters:
            starter.put(False)
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _start_receiver(
        self, peer: int, kind: Kind, expected: Sequence[tuple[Message, tuple[Value, ...]]]
    ) -> None:
        starter: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._starters.append(starter)
        group, stager = self._groups[kind], Stager(self._device)

        def post(number: int) -> tuple[Tensors, list[Any]]:
            message, values = expected[number]
            tensors = {value.name: stager.empty(value.shape, value.torch_dtype) for value in values}
            tagged = _tagged(message, list(tensors.values()))
            return tensors, [group.start_receive(tensor, peer, tag) for tag, tensor in tagged]

        def loop() -> None:
            while starter.get():
                posted = deque(post(number) for number in range(min(_AHEAD, len(expected))))
                for number, (message, _) in enumerate(expected):
                    tensors, works = posted.popleft()
                    for work in works:
                        work.wait()
                    marked = {name: stager.to_device(tensor) for name, tensor in tensors.items()}
                    self._arrived.put((message.operation, marked))
                    with self._interrupt.condition:
                        self._interrupt.condition.notify_all()
                    if number + _AHEAD < len(expected):
                        posted.append(post(number + _AHEAD))

        self._start(loop, f"receive {kind} from {peer}", peer)

    def _start_sender(self, peer: int, kind: Kind) -> None:
        outbox: _Outbox = queue.SimpleQueue()
        self._outboxes[peer, kind] = outbox
        group, stager = self._groups[kind], Stager(self._device)

        def loop() -> None:
            while (item := outbox.get()) is not None:
                message, marked = item
                host = [stager.to_host(staged) for staged in marked.values()]
                works = [group.start_send(tensor, peer, tag) for tag, tensor in _tagged(message, host)]
                for work in works:
                    work.wait()

        self._start(loop, f"send {kind} to {peer}", peer)

    def _start(self, loop: Callable[[], None], name: str, peer: int) -> None:
        def guarded() -> None:
            try:
                loop()
            except RuntimeError as error:  # what gloo raises when the pair is closed
                self._interrupt.trip(PeersLost([peer], error))
            except Exception as error:  # a fault of ours: the compute thread would wait for ever
                self._interrupt.trip(error)

        threading.Thread(target=guarded, name=name, daemon=True).start()


def _tagged(message: Message, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    assert len(tensors) <= _TENSORS_PER_MESSAGE
    first = message.micro_batch * _TENSORS_PER_MESSAGE
    return [(first + number, tensor) for number, tensor in enumerate(tensors)]
