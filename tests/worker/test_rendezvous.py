"""Members of a generation learn plan and members from rank 0, and take none but the manager's."""

from __future__ import annotations

import base64
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from makara.pipeline import Range, grid
from makara.protocol.messages import GenerationOrder, Member
from makara.worker.execution.blocking import GenerationAbandoned, PeersLost
from makara.worker.execution.gloo import Listener
from makara.worker.execution.session import Session
from trainer_processes import TIMEOUT_S

PLAN = grid([Range(0, 1), Range(1, 2)], 1, 2, generation=1)
WORKERS = ["a.0", "a.1", "b.0", "donor.0"]


class Meeting:
    """Sessions of one generation in this process: VM a has two of its workers."""

    def __init__(self) -> None:
        self.listener = Listener("127.0.0.1")
        members = [Member(worker=worker, address="127.0.0.1") for worker in WORKERS]
        self.order = GenerationOrder.of(
            members, PLAN.to_json(), number=1, phase="go", endpoint=self.listener.endpoint, key="k"
        )
        self.sessions: list[Session] = []

    def told(self, worker: str) -> GenerationOrder:
        return self.order.told_to([one for one in WORKERS if one[0] == worker[0]])

    def add(self, worker: str, order: GenerationOrder | None = None) -> Session:
        listener = self.listener if worker == WORKERS[0] else None
        session = Session(order or self.told(worker), worker, listener, TIMEOUT_S)
        self.sessions.append(session)
        return session


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    for session in made.sessions:
        session.close()
    made.listener.close()


def run(calls: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.exception(TIMEOUT_S) for call in [pool.submit(call) for call in calls]]


def test_the_others_learn_plan_and_members_from_rank_0(meeting: Meeting) -> None:
    assert [bool(meeting.told(worker).plan) for worker in WORKERS] == [True, True, False, False]
    sessions = [meeting.add(worker) for worker in WORKERS]
    assert run([session.rendezvous for session in sessions]) == [None] * len(WORKERS)
    for rank, session in enumerate(sessions):
        assert (session.rank, session.members, session.plan) == (rank, WORKERS, PLAN)
    assert [session.trains for session in sessions] == [True, True, False, False]


@pytest.mark.parametrize("change", ["the plan", "an address"])
def test_a_plan_that_is_not_the_managers_is_rank_0s_fault(meeting: Meeting, change: str) -> None:
    """Its VM may be another's by now, or lie."""
    first = meeting.order
    if change == "the plan":
        first = first.model_copy(update={"plan": {**first.plan, "generation": 2}})
    else:
        moved = [first.members[0], Member(worker="a.1", address="127.0.0.2"), *first.members[2:]]
        first = first.model_copy(update={"members": moved})
    liar, other = meeting.add("a.0", first), meeting.add("b.0")
    errors = run([liar.rendezvous, other.rendezvous])
    for error in errors:
        assert isinstance(error, PeersLost)
        assert error.ranks == (0,)
    assert other.members == ["a.0"], "who is lost has a name"


def packed(text: bytes) -> bytes:
    return base64.b85encode(zlib.compress(text))


NO_PLAN = {
    "not in base 85": b"\x00 \xff",
    "empty": b"",
    "not compressed": base64.b85encode(b"[{}, []]"),
    "cut off": base64.b85encode(zlib.compress(b"[{}, []]")[:-6]),
    "not JSON": packed(b"{"),
    "not text": packed(b'"\xff"'),
    "a huge number": packed(b"1" * 10_000),
    "nested deeply": packed(b"[" * 100_000),
    "a nested plan": packed(b'[{"a": ' + b"[" * 900 + b"]" * 900 + b"}, []]"),
    "not a pair": packed(b"[{}]"),
    "an object": packed(b'{"0": {}, "1": []}'),
    "null": packed(b"null"),
    "no plan": packed(b"[[], []]"),
    "no members": packed(b"[{}, {}]"),
    "members without addresses": packed(b'[{}, [{"worker": "a.0"}]]'),
    "names that are none": packed(b'[{}, [{"worker": 1, "address": null}]]'),
    "others": packed(b'[{}, [{"worker": "\\ud800", "address": ""}]]'),
    "larger than any plan": packed(b" " * (1 << 27)),
}


@pytest.mark.parametrize("stored", [*NO_PLAN.values()], ids=[*NO_PLAN])
def test_whatever_rank_0_stores_in_place_of_a_plan_is_its_fault(meeting: Meeting, stored: bytes) -> None:
    """Found: it ended the trainers of all others."""
    meeting.listener.serve().set("plan", stored)  # pyright: ignore[reportArgumentType]
    other = meeting.add("b.0")
    tracemalloc.start()
    try:
        [error] = run([other.rendezvous])
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(error, PeersLost)
    assert error.ranks == (0,)


def test_whatever_a_member_stores_in_place_of_its_value_is_its_fault(meeting: Meeting) -> None:
    sessions = [meeting.add(worker) for worker in WORKERS]
    assert run([session.rendezvous for session in sessions]) == [None] * len(WORKERS)
    store = meeting.listener.serve()
    store.set("said/2", NO_PLAN["nested deeply"])  # pyright: ignore[reportArgumentType]
    for rank in (1, 3):
        store.set(f"said/{rank}", packed(b"1"))  # pyright: ignore[reportArgumentType]
    [error] = run([lambda: sessions[0].gather("said", 1) and None])
    assert isinstance(error, PeersLost)
    assert error.ranks == (2,)


def test_one_that_waits_for_the_plan_of_rank_0_can_be_called_off(meeting: Meeting) -> None:
    meeting.listener.serve()
    waiting = meeting.add("b.0")
    timer = threading.Timer(0.5, lambda: waiting.interrupt.trip(GenerationAbandoned()))
    timer.start()
    [error] = run([waiting.rendezvous])
    assert isinstance(error, GenerationAbandoned)


def test_one_that_waits_for_the_plan_of_a_rank_0_that_ends_has_lost_it(meeting: Meeting) -> None:
    meeting.listener.close()  # nobody listens there any more
    waiting = meeting.add("b.0", meeting.told("b.0"))
    waiting._link_timeout_s = 1.0
    [error] = run([waiting.rendezvous])
    assert isinstance(error, PeersLost)
    assert [waiting.members[rank] for rank in error.ranks] == ["a.0"]
