"""Point-to-point channels for activations and gradients: a thread for each peer and direction.

For each directed pair of workers and each kind of message the order on the wire is known beforehand (see
`pipeline.traffic`): receives are posted ahead of need, and activations and gradients use separate groups and
cannot be confused. A message without values, back to sections that get no gradient, is one byte: like any
other it comes after what it answers, and so bounds the micro-batches in flight.

Threads are needed because nothing wakes a thread that waits in gloo. Calls that do not block are made by the
compute thread, which saves a thread that would compete for the interpreter lock just when an operation ends.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...model.partition.partition import CutTensor, Sections
from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Plan
from ...pipeline.traffic import Message, Traffic
from .blocking import Interrupt, PeersLost
from .gloo import GroupBroken, ProcessGroup, wait
from .staging import Staged, Stager

_TENSORS_PER_MESSAGE = 64  # bounds the tags of one message
_AHEAD = 2  # receives posted on each channel: while one is passed on, the wire has the next

Tensors = dict[str, torch.Tensor]
_Marked = dict[str, Staged]


def values_of(plan: Plan, sections: Sections, message: Message) -> tuple[CutTensor, ...]:
    """The tensors of a message: activations cross the boundary where the consuming hop begins, gradients the
    one where it ends, if they reach any of its sections."""
    path = plan.path_of(message.micro_batch)
    span = path.hops[message.stage].range
    if message.kind is Kind.FORWARD:
        return sections.inputs_of(span.start)
    if span.stop <= path.open_from:
        return ()
    return tuple(value for value in sections.outputs_of(span.stop) if value.needs_grad)


class P2PChannels:
    """One worker's channels for one generation. Call `begin_step` before the first operation of each step."""

    def __init__(
        self,
        traffic: Traffic,
        values: Callable[[Message], tuple[CutTensor, ...]],
        groups: Mapping[Kind, ProcessGroup],
        interrupt: Interrupt,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._interrupt = interrupt
        self._device = device
        self._compute = Stager(device)
        self._arrived: queue.SimpleQueue[tuple[Operation, _Marked] | None] = queue.SimpleQueue()
        arrived = self._arrived
        interrupt.on_trip(lambda: arrived.put(None))  # without a reference to self, which holds the interrupt
        self._starters: list[queue.SimpleQueue[bool]] = []
        self._outboxes: dict[tuple[int, Kind], _Outbox] = {}
        incoming: dict[tuple[int, Kind], list[tuple[Message, tuple[CutTensor, ...]]]] = {}
        for message in traffic.receives:
            incoming.setdefault((message.peer, message.kind), []).append((message, values(message)))
        for (peer, kind), expected in incoming.items():
            self._start_receiver(peer, kind, expected)
        for peer, kind in sorted({(message.peer, message.kind) for message in traffic.sends}):
            self._start_sender(peer, kind)
        self._outgoing = {
            message.operation: _Outgoing(
                self._outboxes[message.peer, message.kind],
                groups[message.kind],
                message.peer,
                _first_tag(message),
                tuple(value.name for value in values(message)),
            )
            for message in traffic.sends
        }

    def begin_step(self) -> None:
        """Post the first receives of the next step."""
        for starter in self._starters:
            starter.put(True)

    def send(self, consumer: Operation, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send `consumer`'s inputs, as device tensors by value name; never blocks on the wire. The tensors
        must not be modified afterwards: on the CPU they are sent in place. Raises the interrupt's cause."""
        outgoing = self._outgoing[consumer]
        sending = _Sending(outgoing, [self._compute.mark(tensors[name]) for name in outgoing.names])
        if self._compute.is_host:
            try:
                sending.start(self._compute)
            except GroupBroken as error:
                self._interrupt.trip(PeersLost([outgoing.peer], error))
                self._interrupt.check()
        outgoing.outbox.put(sending)

    def wait(self, most_s: float | None = None) -> tuple[Operation, Tensors]:
        """Wait for an arrival: (the operation that it enables, its tensors on the device). Raises the
        interrupt's cause, and `queue.Empty` after `most_s`."""
        item = self._arrived.get(timeout=most_s)
        self._interrupt.check()
        assert item is not None, "only a tripped interrupt puts none"
        operation, marked = item
        return operation, {name: self._compute.take(staged) for name, staged in marked.items()}

    def collect(self) -> list[tuple[Operation, Tensors]]:
        """All arrivals since the last call, without waiting."""
        self._interrupt.check()
        items: list[tuple[Operation, Tensors]] = []
        while not self._arrived.empty():
            items.append(self.wait())
        return items

    def close(self) -> None:
        """Let the threads end; those blocked on a lost peer end with the process."""
        for starter in self._starters:
            starter.put(False)
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _start_receiver(
        self, peer: int, kind: Kind, expected: Sequence[tuple[Message, tuple[CutTensor, ...]]]
    ) -> None:
        starter: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._starters.append(starter)
        group, stager = self._groups[kind], Stager(self._device)
        operations = [message.operation for message, _ in expected]

        def post(number: int) -> tuple[Tensors, list[Any]]:
            message, values = expected[number]
            tensors = {value.name: stager.empty(value.shape, value.torch_dtype) for value in values}
            tagged = enumerate(_on_wire([*tensors.values()]), _first_tag(message))
            return tensors, [group.start_receive(tensor, peer, tag) for tag, tensor in tagged]

        def loop() -> None:
            while starter.get():
                posted = deque(post(number) for number in range(min(_AHEAD, len(expected))))
                for number, operation in enumerate(operations):
                    tensors, works = posted.popleft()
                    for work in works:
                        wait(work)
                    marked = {name: stager.to_device(tensor) for name, tensor in tensors.items()}
                    self._arrived.put((operation, marked))
                    if number + _AHEAD < len(expected):
                        posted.append(post(number + _AHEAD))

        self._start(loop, f"receive {kind} from {peer}", peer)

    def _start_sender(self, peer: int, kind: Kind) -> None:
        outbox: _Outbox = queue.SimpleQueue()
        self._outboxes[peer, kind] = outbox
        stager = Stager(self._device)

        def loop() -> None:
            while (sending := outbox.get()) is not None:
                if not stager.is_host:
                    sending.start(stager)
                for work in sending.works:
                    wait(work)
                del sending  # frees the tensors before waiting for the next one

        self._start(loop, f"send {kind} to {peer}", peer)

    def _start(self, loop: Callable[[], None], name: str, peer: int) -> None:
        def guarded() -> None:
            try:
                loop()
            except GroupBroken as error:
                self._interrupt.trip(PeersLost([peer], error))
            except Exception as error:  # our own fault; else the compute thread would wait for ever
                self._interrupt.trip(error)

        threading.Thread(target=guarded, name=name, daemon=True).start()


class _Outgoing(NamedTuple):
    """A message's fixed properties."""

    outbox: _Outbox
    group: ProcessGroup
    peer: int
    first_tag: int
    names: tuple[str, ...]


class _Sending:
    """A message being sent; keeps its tensors alive."""

    def __init__(self, outgoing: _Outgoing, marked: list[Staged]) -> None:
        self._outgoing = outgoing
        self._marked = marked

    def start(self, stager: Stager) -> None:
        """Start the sends; `works` are complete when the peer has received the tensors."""
        _, group, peer, first_tag, _ = self._outgoing
        self._host = _on_wire([stager.to_host(staged) for staged in self._marked])
        self.works = [group.start_send(tensor, peer, tag) for tag, tensor in enumerate(self._host, first_tag)]


_Outbox = queue.SimpleQueue[_Sending | None]


def _on_wire(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors sent for these values: at least one byte."""
    return values or [torch.zeros(1, dtype=torch.uint8)]


def _first_tag(message: Message) -> int:
    return message.micro_batch * _TENSORS_PER_MESSAGE
