"""How a member of one generation reaches the others: the rendezvous, links, groups, and the way out."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from ...protocol.messages import At, GenerationOrder
from ..progress import Progress
from .blocking import BlockingThread, Interrupt, PeersLost
from .gloo import Group, Listener, Store, connect, fetch
from .links import Identity, Links

T = TypeVar("T")
OpenGroup = Callable[[str, Sequence[int]], Group]
"""Opens a group of this name over these ranks; see `Communicator.group`."""


class Communicator:
    """Made from a `go` order. Nothing blocks before `rendezvous`; everything that may block can be
    interrupted.
    """

    def __init__(
        self,
        order: GenerationOrder,
        worker: str,
        listener: Listener | None,
        link_timeout_s: float = 10.0,
        progress: Progress | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_lost`: called whenever the link to one more member broke."""
        self.number = order.number
        self.members = [member.worker for member in order.members]
        self.rank = self.members.index(worker)
        self.progress = progress or Progress()
        self.interrupt = Interrupt(on_lost)
        self.courier = BlockingThread(f"collectives-g{order.number}", self.interrupt)
        self.address = order.members[self.rank].address
        self._endpoint = order.endpoint
        self._key = order.key.encode()
        self._listener = listener
        self._link_timeout_s = link_timeout_s
        self._links: Links | None = None
        self._store: Store | None = None
        self._groups: list[Group] = []

    def rendezvous(self) -> None:
        """Reach the generation's store: serve it on rank 0, connect to it elsewhere."""
        listener, endpoint = self._listener, self._endpoint
        assert endpoint is not None, "a go order carries the rendezvous"
        if self.rank == 0:
            assert listener is not None, "rank 0 listens before it says that it is prepared"
            self._store = self.courier.call(listener.serve, [0])
        else:
            self._store = self.courier.call(lambda: connect(endpoint, self._link_timeout_s), [0])

    def board(self) -> Store:
        """A connection of one's own to the rendezvous store, for another thread. Raises `DistError`."""
        assert self._endpoint is not None
        return connect(self._endpoint, self._link_timeout_s)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every member's JSON value, in rank order; a barrier."""
        store = self._store
        assert store is not None
        mine = _packed(value)

        def value_of(rank: int) -> bytes:
            return fetch(store, f"{name}/{rank}", lambda: self.interrupt.tripped)

        self.courier.call(lambda: store.set(f"{name}/{self.rank}", mine), [0])
        # What fails here is the store on rank 0; one who is late or gone makes the others wait.
        with self.progress.being(At.MEMBERS):
            return [
                _unpacked(self.courier.call(partial(value_of, rank), [0]))
                for rank in range(len(self.members))
            ]

    def run(self, script: Callable[[Store, OpenGroup], T], within_s: float, what: str) -> T:
        """What `script` makes of the store that all members have and of groups that it opens, while they all
        run theirs. Raises `PeersLost` where that is not over within the bound; `what` says what it is."""
        store = self._store
        assert store is not None
        call = self.courier.start(lambda: script(store, self._open))
        with self.progress.being(At.PEER):
            self.interrupt.wait_for(lambda: call.done, within_s)
        if not call.done:
            self.interrupt.trip(PeersLost([], f"{what} not over in {within_s:g} s"))
        return self.courier.result(call)

    def link(self, neighbours: Collection[int]) -> None:
        """Reach all members with whom this one shares a group, and notice from now on when one is lost.

        Nobody goes on before everybody has reached theirs. Raises `PeersLost` with those that this member
        cannot reach, which may be none where it is others that cannot reach each other.
        """
        if len(self.members) == 1:
            return
        identity, bound_s = Identity(self.number, self.rank, self._key), self._link_timeout_s
        links = Links(identity, self.address, bound_s, len(self.members))
        self._links = links
        endpoints = self.gather("links", links.endpoint)
        missed = self.courier.call(lambda: links.reach({rank: endpoints[rank] for rank in neighbours}))
        everybodys = self.gather("missed", sorted(missed))
        if any(everybodys):
            why = "; ".join(missed.values()) or "others cannot reach each other"
            self.interrupt.trip(PeersLost(sorted(missed), why))
            self.interrupt.check()
        links.watch(neighbours, self.interrupt.lose)  # no reference to the session, which keeps its links

    def leave(self) -> None:
        """Tell the members that this one is linked with that it goes. What ends it from now on is no loss."""
        if self._links is not None:
            self._links.leave()

    def group(self, name: str, ranks: Sequence[int]) -> Group:
        """A process group over `ranks`, of which this member is one; all of them must call, linked before."""
        # Who is lost here its link tells; gloo names nobody.
        return self.courier.call(lambda: self._open(name, ranks))

    def close(self) -> None:
        """Let the helper threads end; those still blocked in a group are woken, here and at the peers. The
        groups are taken down by a thread of their own. On rank 0 the rendezvous store is there as long as
        this object. A second time changes nothing."""
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

    def _open(self, name: str, ranks: Sequence[int]) -> Group:
        """As `group`, on the courier's thread."""
        assert self._store is not None
        group = Group(self._store, f"groups/{name}", self.rank, ranks, self.address)
        self._groups.append(group)
        return group


def _packed(value: Any) -> str:
    """A store takes 8 MB for one value, and what is measured of a model of many sections may be more."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(data)))
