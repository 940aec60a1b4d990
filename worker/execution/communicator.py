"""Connects a member of a generation with the others: the rendezvous store, links, and process groups."""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ...protocol.messages import At, GenerationOrder, Member, plan_hash
from ..progress import ProgressCounters
from .blocking import BlockingThread, Interrupt, PeersLost
from .gloo import Listener, ProcessGroup, Store, connect, fetch
from .links import Links, MemberIdentity

T = TypeVar("T")
OpenGroup = Callable[[str, Sequence[int]], ProcessGroup]
"""Opens a group of this name over these ranks; see `Communicator.group`."""
_PLAN_AND_MEMBERS = TypeAdapter(tuple[dict[str, Any], list[Member]])
_MOST_BYTES = 1 << 26  # of a value; plan and members of 10,000 workers have about a hundredth


class Communicator:
    """One member's connections, made from a `go` order.

    Nothing blocks before `rendezvous`; everything that may block can be interrupted.
    """

    def __init__(
        self,
        order: GenerationOrder,
        worker: str,
        listener: Listener | None,
        link_timeout_s: float = 10.0,
        progress: ProgressCounters | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_lost` is called whenever the link to another member breaks."""
        self.number = order.number
        self.rank = order.ranks[worker]
        self.members = [order.first]
        """By rank. The others are known once `rendezvous` returns."""
        self.rendezvous_s = 0.0
        self._order = order
        self.progress = progress or ProgressCounters()
        self.interrupt = Interrupt(on_lost)
        self.courier = BlockingThread(f"collectives-g{order.number}", self.interrupt)
        self._endpoint = order.endpoint
        self._key = order.key.encode()
        self._listener = listener
        self._link_timeout_s = link_timeout_s
        self._links: Links | None = None
        self._endpoints: list[str] = []
        self._store: Store | None = None
        self._groups: list[ProcessGroup] = []

    def rendezvous(self) -> None:
        """Serve the generation's store on rank 0, and give all others plan and members there.

        Raises `Interrupted`; `PeersLost`, naming rank 0, also for a plan that is not the manager's.
        """
        began = time.monotonic()
        with self.progress.being(At.MEMBERS):
            stored = self._meet()
        plan, members = self._read(stored, self._plan_and_members, 0)
        self.members = [member.worker for member in members]
        self.address = members[self.rank].address
        self._take_plan(plan)
        self.rendezvous_s = time.monotonic() - began

    def _meet(self) -> bytes:
        """Open the generation's store, or connect to it; what it has under the key of plan and members."""
        listener, endpoint = self._listener, self._endpoint
        assert endpoint is not None, "a go order carries the rendezvous"
        if self.rank == 0:
            assert listener is not None, "rank 0 listens before it says that it is prepared"
            store = self._store = self.courier.call(listener.serve, [0])
            told = _packed([self._order.plan, [member.model_dump() for member in self._order.members]])
            self.courier.call(lambda: store.set("plan", told), [0])
            return told.encode()
        store = self._store = self.courier.call(lambda: connect(endpoint, self._link_timeout_s), [0])
        return self.courier.call(partial(fetch, store, "plan", lambda: self.interrupt.tripped), [0])

    def _plan_and_members(self, stored: bytes) -> tuple[dict[str, Any], list[Member]]:
        """Raises `ValueError` unless they are the manager's."""
        plan, members = _PLAN_AND_MEMBERS.validate_python(_unpacked(stored))
        if plan_hash(plan, members) != self._order.plan_hash:
            raise ValueError("it is another plan than the manager's")
        return plan, members

    def _read(self, stored: bytes, read: Callable[[bytes], T], rank: int) -> T:
        """What the member of this rank has stored. Raises `PeersLost`, naming it, if that cannot be read: its
        VM may be another's by now."""
        try:
            return read(stored)
        except (ValueError, RecursionError) as error:
            self.interrupt.trip(PeersLost([rank], f"what rank {rank} gives cannot be used: {error}"))
            self.interrupt.check()
            raise

    def _take_plan(self, plan: dict[str, Any]) -> None:
        """What there is to do with the generation's plan once it is known; empty where it has none."""

    def board(self) -> Store:
        """A separate connection to the rendezvous store, for another thread. Raises `DistError`."""
        assert self._endpoint is not None
        return connect(self._endpoint, self._link_timeout_s)

    def gather(self, name: str, value: Any, num_ranks: int | None = None) -> list[Any]:
        """Gather every member's JSON value, or that of the first ranks, in rank order; a barrier."""
        store = self._store
        assert store is not None
        mine = _packed(value)

        def value_of(rank: int) -> bytes:
            return fetch(store, f"{name}/{rank}", lambda: self.interrupt.tripped)

        self.courier.call(lambda: store.set(f"{name}/{self.rank}", mine), [0])
        # Only the store on rank 0 can fail here; a member that is late or gone makes the others wait.
        with self.progress.being(At.MEMBERS):
            return [
                self._read(self.courier.call(partial(value_of, rank), [0]), _unpacked, rank)
                for rank in range(len(self.members) if num_ranks is None else num_ranks)
            ]

    def run(self, script: Callable[[Store, OpenGroup], T], within_s: float, what: str) -> T:
        """Run `script` with the members' store and a function that opens groups, while all members run
        theirs; returns its result. Raises `PeersLost`, naming `what`, if it takes longer than `within_s`."""
        store = self._store
        assert store is not None
        call = self.courier.start(lambda: script(store, self._open))
        with self.progress.being(At.PEER):
            self.interrupt.wait_for(lambda: call.done, within_s)
        if not call.done:
            self.interrupt.trip(PeersLost([], f"{what} not over in {within_s:g} s"))
        return self.courier.result(call)

    def introduce(self, choice: Any = None) -> list[Any]:
        """Listen for other members' links, and tell all where, and `choice`: what this one is about to do, as
        JSON. Returns every member's choice, in rank order, before anybody connects."""
        if len(self.members) == 1:
            return [choice]
        identity, bound_s = MemberIdentity(self.number, self.rank, self._key), self._link_timeout_s
        self._links = Links(identity, self.address, bound_s, len(self.members))
        told = self.gather("links", [self._links.endpoint, choice])
        self._endpoints = [endpoint for endpoint, _ in told]
        return [chosen for _, chosen in told]

    def link(self, neighbours: Collection[int]) -> None:
        """Connect to all members with which this one shares a group, and watch from now on for lost ones; all
        are introduced.

        Returns when all members have reached theirs. Raises `PeersLost` with the ranks that this member
        cannot reach, which is empty if only other members cannot reach each other.
        """
        if len(self.members) == 1:
            return
        links, endpoints = self._links, self._endpoints
        assert links is not None, "members introduce themselves first"
        missed = self.courier.call(lambda: links.reach({rank: endpoints[rank] for rank in neighbours}))
        everybodys = self.gather("missed", sorted(missed))
        if any(everybodys):
            why = "; ".join(missed.values()) or "others cannot reach each other"
            self.interrupt.trip(PeersLost(sorted(missed), why))
            self.interrupt.check()
        links.watch(neighbours, self.interrupt.lose)  # without a reference to self, which holds the links

    def leave(self) -> None:
        """Tell linked members that this one leaves, so that they do not report its end as a loss."""
        if self._links is not None:
            self._links.leave()

    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        """Open a process group over `ranks`, which include this member; all must call it, once linked."""
        # A peer lost here is named by its link; gloo names none.
        return self.courier.call(lambda: self._open(name, ranks))

    def close(self) -> None:
        """Let the helper threads end, and wake those blocked in a group, here and at the peers. A separate
        thread closes the groups. On rank 0 the rendezvous store lives as long as this object. Idempotent."""
        self.courier.close()
        if self._links is not None:
            self._links.close()
        groups, self._groups = self._groups, []
        if not groups:
            return
        if self.interrupt.tripped:
            for group in groups:
                group.close()
        released = [group.release() for group in groups]
        threading.Thread(target=released.clear, name=f"closing-g{self.number}", daemon=True).start()

    def _open(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        """Like `group`, on the thread for blocking calls."""
        assert self._store is not None
        group = ProcessGroup(self._store, f"groups/{name}", self.rank, ranks, self.address)
        self._groups.append(group)
        return group


def _packed(value: Any) -> str:
    """Compress a value: a store accepts 8 MB, and measurements of many sections may be larger."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(data: bytes) -> Any:
    """Raises `ValueError` or `RecursionError` for what `_packed` did not make, or for too large a value."""
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(base64.b85decode(data), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof:
        raise ValueError(f"it is not whole, or of more than {_MOST_BYTES} bytes")
    return json.loads(text)
