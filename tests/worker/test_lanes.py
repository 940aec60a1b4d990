"""Messages between two workers over real gloo: none is held back or mixed up, and whoever waits is woken."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from makara.model.partition.partitioned_model import CutTensor
from makara.pipeline import Kind, Operation, Range, grid, orders
from makara.pipeline.traffic import Message, messages
from makara.worker.execution.blocking import GenerationAbandoned, Interrupt, PeersLost
from makara.worker.execution.gloo import GroupBroken, Listener, ProcessGroup, connect
from makara.worker.execution.p2p_channels import P2PChannels

PLAN = grid([Range(0, 1), Range(1, 2)], 1, 8)
ORDERS = orders(PLAN)
VALUE = CutTensor("x", (300_000,), "float32", needs_grad=True)  # more than a socket takes at once


class Worker:
    """Activations carry a value. Gradients carry none, as under a frozen beginning."""

    def __init__(self, rank: int, channels: dict[Kind, ProcessGroup]) -> None:
        self.interrupt = Interrupt()
        self.channels = channels
        traffic = messages(PLAN, ORDERS)[rank]
        self.lanes = P2PChannels(traffic, _values, channels, self.interrupt, torch.device("cpu"))

    def send(self, operation: Operation, number: int) -> None:
        self.lanes.send(operation, {"x": torch.full(VALUE.shape, float(number))})


def _values(message: Message) -> tuple[CutTensor, ...]:
    return (VALUE,) if message.kind is Kind.FORWARD else ()


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    listener = Listener("127.0.0.1")
    stores = [listener.serve(), connect(listener.endpoint)]

    def worker(rank: int) -> Worker:
        names = {Kind.FORWARD: "activations", Kind.BACKWARD: "gradients"}
        return Worker(
            rank,
            {
                kind: ProcessGroup(stores[rank], name, rank, (0, 1), "127.0.0.1")
                for kind, name in names.items()
            },
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(worker, (0, 1))
    yield first, second
    for worker_ in (first, second):
        worker_.lanes.close()
        for group in worker_.channels.values():
            group.close()


def test_messages_sent_before_anybody_receives_arrive_in_their_order(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    forwards = [task for task in ORDERS[1] if task.kind is Kind.FORWARD]
    for task in forwards:
        first.send(task, task.micro_batch)
    second.lanes.begin_step()
    for task in forwards:
        operation, tensors = second.lanes.wait()
        assert operation == task
        assert torch.equal(tensors["x"], torch.full(VALUE.shape, float(task.micro_batch)))
    assert second.lanes.collect() == []


def test_a_message_without_values_arrives_when_it_was_sent_and_not_before(
    workers: tuple[Worker, Worker],
) -> None:
    first, second = workers
    backwards = [task for task in ORDERS[0] if task.kind is Kind.BACKWARD]
    first.lanes.begin_step()
    with pytest.raises(queue.Empty):
        first.lanes.wait(0.01)
    for task in backwards:
        second.lanes.send(task, {})
        assert first.lanes.wait() == (task, {})
    assert first.lanes.collect() == []


def test_who_waits_for_a_silent_peer_is_woken(workers: tuple[Worker, Worker]) -> None:
    first, _ = workers
    first.lanes.begin_step()
    with pytest.raises(queue.Empty):
        first.lanes.wait(0.01)
    threading.Timer(0.01, first.interrupt.trip, [GenerationAbandoned()]).start()
    with pytest.raises(GenerationAbandoned):
        first.lanes.wait()
    with pytest.raises(GenerationAbandoned):
        first.lanes.collect()


def test_who_sends_to_a_lost_peer_learns_which(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    for group in second.channels.values():
        group.close()
    first.lanes.begin_step()

    def use() -> None:
        for task in (task for task in ORDERS[1] if task.kind is Kind.FORWARD):
            first.send(task, 0)
        first.lanes.wait()

    with pytest.raises(PeersLost) as caught:
        use()
    assert caught.value.ranks == (1,)


def test_an_interrupt_that_has_tripped_wakes_who_comes_later() -> None:
    interrupt, woken = Interrupt(), [0]
    interrupt.trip(GenerationAbandoned())
    interrupt.on_trip(lambda: woken.append(1))
    interrupt.trip(GenerationAbandoned())
    assert woken == [0, 1]


def test_a_group_that_was_released_refuses_and_sums_nothing_in_silence(
    workers: tuple[Worker, Worker],
) -> None:
    group = workers[0].channels[Kind.FORWARD]
    group.release()
    for use in (lambda: group.sum(torch.zeros(1)), lambda: group.start_send(torch.zeros(1), 1, 0)):
        with pytest.raises(GroupBroken, match=r"the group of ranks \(0, 1\) is closed"):
            use()
