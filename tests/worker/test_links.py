"""Links between the members of a generation: who is reached, who is refused, and how a loss is noticed."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from makara.worker.execution.links import Links, MemberIdentity
from trainer_processes import CONTEXT, TIMEOUT_S

KEY = b"of generation 3"


class Members:
    """Links of ranks in this process; losses are noted as (who, whom)."""

    def __init__(self) -> None:
        self.links: dict[int, Links] = {}
        self.lost: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def add(self, *ranks: int, key: bytes = KEY, bound_s: float = 60.0) -> None:
        for rank in ranks:
            self.links[rank] = Links(MemberIdentity(3, rank, key), f"127.0.0.{rank + 2}", bound_s)

    def reach(self, rank: int, *others: int) -> dict[int, str]:
        return self.links[rank].reach({other: self.links[other].endpoint for other in others})

    def watch(self, rank: int, *others: int) -> None:
        self.links[rank].watch(others, lambda lost, _: self.lost.put((rank, lost)))

    def close(self) -> None:
        for links in self.links.values():
            links.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def test_members_with_the_key_reach_each_other(members: Members) -> None:
    members.add(0, 1, 2)
    assert members.reach(0, 1, 2) == {}
    assert members.reach(1, 0, 2) == {}
    assert members.reach(2, 0, 1) == {}


def test_who_does_not_answer_is_named_and_nobody_else(members: Members) -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    members.add(0, 1, bound_s=4.0)
    with socket.create_server(("127.0.0.9", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        blackhole = f"127.0.0.9:{full.getsockname()[1]}"
        missed = members.links[0].reach({1: members.links[1].endpoint, 2: blackhole})
        for filler in fillers:
            filler.close()
    assert list(missed) == [2]
    assert blackhole in missed[2]


def test_an_end_that_does_not_know_the_key_is_not_reached_and_not_believed(members: Members) -> None:
    members.add(0, bound_s=1.0)
    members.add(1, key=b"of another", bound_s=1.0)
    assert list(members.reach(0, 1)) == [1]
    assert list(members.reach(1, 0)) == [0]


@pytest.mark.parametrize(
    "text", [b"\n", b"[]\n", b'{"rank": 1}\n', b"x" * 4096, b'{"rank":"1","nonce":"","proof":""}\n']
)
def test_a_stranger_gets_nothing_and_disturbs_nobody(members: Members, text: bytes) -> None:
    members.add(0, 1)
    host, port = members.links[0].endpoint.split(":")
    with socket.create_connection((host, int(port))) as stranger, stranger.makefile("rwb") as stream:
        assert list(json.loads(stream.readline())) == ["nonce"]
        stream.write(text)
        stream.flush()
        with pytest.raises((ConnectionResetError, StopIteration)):
            next(stream)
    assert members.reach(1, 0) == {}


def stranger_to(links: Links) -> socket.socket:
    """Somebody who connects and says nothing."""
    host, port = links.endpoint.split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def is_closed(connection: socket.socket) -> bool:
    """Reads what comes, until the end or until nothing comes."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_nobody_listens_once_all_members_are_linked(members: Members) -> None:
    members.add(0, 1)
    assert members.reach(0, 1) == members.reach(1, 0) == {}
    with stranger_to(members.links[0]) as early:
        members.watch(0, 1)
        assert is_closed(early)
        with pytest.raises(ConnectionRefusedError):
            stranger_to(members.links[0])
    members.watch(1, 0)
    members.links[1].close()
    with pytest.raises(queue.Empty):  # the link itself lives on
        members.lost.get(timeout=0.3)


def test_strangers_hold_few_connections_and_keep_no_member_away(members: Members) -> None:
    members.add(0, 1, bound_s=60.0)
    strangers = [stranger_to(members.links[0]) for _ in range(100)]
    assert members.reach(1, 0) == {}
    for connection in strangers:
        connection.settimeout(0.05)
    held = [not is_closed(connection) for connection in strangers]
    for connection in strangers:
        connection.close()
    assert held == sorted(held)  # the oldest had to go
    assert 0 < sum(held) <= 65


def test_who_says_nothing_is_let_go_before_others_give_up(members: Members) -> None:
    members.add(0, 1, bound_s=8.0)
    with stranger_to(members.links[0]) as silent, socket.create_server(("127.0.0.9", 0)) as mute:
        nobody = f"127.0.0.9:{mute.getsockname()[1]}"
        with ThreadPoolExecutor() as pool:
            reaching = pool.submit(members.links[1].reach, {5: nobody})
            assert is_closed(silent)
            assert not reaching.done()
            members.links[1].leave()  # nobody waits until it gives up


def test_a_member_that_leaves_is_not_lost(members: Members) -> None:
    members.add(0, 1, 2)
    for rank, others in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):
        assert members.reach(rank, *others) == {}
    for rank, others in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):
        members.watch(rank, *others)
    members.links[1].close()
    with pytest.raises(queue.Empty):
        members.lost.get(timeout=0.3)


def test_a_member_whose_process_dies_is_lost_at_once(members: Members) -> None:
    ours, theirs = CONTEXT.Pipe()
    members.add(0)
    process = CONTEXT.Process(
        target=_wait_for_a_signal, args=(theirs, members.links[0].endpoint), daemon=True
    )
    process.start()
    assert members.links[0].reach({1: ours.recv()}) == {}
    assert ours.recv() == {}
    members.watch(0, 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert members.lost.get(timeout=TIMEOUT_S) == (0, 1)


def test_a_member_whose_process_dies_when_it_has_left_is_not_lost(members: Members) -> None:
    ours, theirs = CONTEXT.Pipe()
    members.add(0)
    process = CONTEXT.Process(target=_leave_and_die, args=(theirs, members.links[0].endpoint), daemon=True)
    process.start()
    assert members.links[0].reach({1: ours.recv()}) == {}
    assert ours.recv() == {}
    members.watch(0, 1)
    ours.send("leave")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(queue.Empty):
        members.lost.get(timeout=0.3)


def _be_rank_one(connection, endpoint: str) -> Links:
    links = Links(MemberIdentity(3, 1, KEY), "127.0.0.1", 60.0)
    connection.send(links.endpoint)
    connection.send(links.reach({0: endpoint}))
    return links


def _wait_for_a_signal(connection, endpoint: str) -> None:
    links = _be_rank_one(connection, endpoint)
    signal.pause()
    links.close()


def _leave_and_die(connection, endpoint: str) -> None:
    links = _be_rank_one(connection, endpoint)
    connection.recv()
    links.leave()
    os.kill(os.getpid(), signal.SIGKILL)
