"""Waking a compute thread that waits for its peers."""

import threading

import pytest
import torch
from makara.worker.execution.blocking import BlockingThread, GenerationAbandoned, Interrupt, PeersLost
from makara.worker.execution.gloo import GroupBroken


def test_courier_returns_the_result_of_the_call() -> None:
    courier = BlockingThread("test", Interrupt())
    assert courier.call(lambda: 42) == 42
    courier.close()


def test_an_order_to_abandon_wakes_a_caller_whose_call_never_returns() -> None:
    interrupt = Interrupt()
    courier = BlockingThread("test", interrupt)
    entered, never = threading.Event(), threading.Event()

    def blocked() -> None:
        entered.set()
        never.wait()

    def abandon_once_blocked() -> None:
        entered.wait()
        interrupt.trip(GenerationAbandoned())

    threading.Thread(target=abandon_once_blocked, daemon=True).start()
    with pytest.raises(GenerationAbandoned):
        courier.call(blocked)
    never.set()


def test_a_transport_error_becomes_the_loss_of_the_named_peers() -> None:
    def broken() -> None:
        raise GroupBroken("Connection closed by peer")

    courier = BlockingThread("test", Interrupt())
    with pytest.raises(PeersLost, match="Connection closed") as caught:
        courier.call(broken, ranks=[3])
    assert caught.value.ranks == (3,)


def test_an_error_of_this_process_is_no_loss_of_peers() -> None:
    def exhausted() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")  # a RuntimeError

    interrupt = Interrupt()
    courier = BlockingThread("test", interrupt)
    with pytest.raises(torch.OutOfMemoryError):
        courier.call(exhausted, ranks=[3])
    assert not interrupt.tripped
    courier.close()


def test_the_first_cause_wins() -> None:
    interrupt = Interrupt()
    interrupt.trip(PeersLost([1], "gone"))
    interrupt.trip(GenerationAbandoned())
    with pytest.raises(PeersLost):
        interrupt.check()


def test_who_is_lost_after_the_first_is_known_too() -> None:
    told: list[frozenset[int]] = []
    interrupt = Interrupt(lambda: told.append(interrupt.lost))
    for rank in (2, 1):
        interrupt.lose(rank, ConnectionResetError("its process has ended"))
    with pytest.raises(PeersLost) as caught:
        interrupt.check()
    assert caught.value.ranks == (2,)
    assert told == [frozenset({2}), frozenset({1, 2})]


def test_an_error_of_the_call_itself_reaches_the_caller_and_harms_nobody() -> None:
    def wrong() -> None:
        raise ValueError("not a transport error")

    courier = BlockingThread("test", Interrupt())
    with pytest.raises(ValueError, match="not a transport error"):
        courier.call(wrong)
    assert courier.call(lambda: "still serving") == "still serving"
    courier.close()


def test_the_failure_of_a_started_call_is_told_when_its_result_is_asked_for() -> None:
    def broken() -> None:
        raise GroupBroken("Connection closed by peer")

    interrupt = Interrupt()
    courier = BlockingThread("test", interrupt)
    failed = courier.start(broken)
    after = courier.start(lambda: "never run")
    interrupt.wait_for(lambda: after.done)  # a lane that knows which peer is lost may trip it first
    assert not interrupt.tripped
    with pytest.raises(PeersLost, match="Connection closed"):
        courier.result(after)
    with pytest.raises(PeersLost, match="Connection closed"):
        courier.result(failed)


def test_results_of_started_calls_come_in_the_order_given() -> None:
    courier = BlockingThread("test", Interrupt())
    seen: list[int] = []
    calls = [courier.start(lambda n=n: seen.append(n)) for n in range(5)]
    courier.result(calls[-1])
    assert seen == list(range(5))
    courier.close()
