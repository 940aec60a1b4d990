"""Process groups of one generation over gloo, bound to the job's private address.

The groups are built directly, not by `init_process_group`: a process forms many generations in its life,
and an abandoned one may still hold blocked threads, so nothing global may be involved. `ProcessGroupGloo`,
its `_Options` and `create_device` are not documented API; they are used here only, checked with torch
2.13. CUDA tensors are staged through host memory by the callers.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("makara.gloo")

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_CLOSING_TAG = (1 << 31) - 1  # of a message that is never sent
_CHECK_S = 5.0

# Long, because the interrupt ends waits, not gloo's timeout, which would close all pairs of a group.
_FOREVER = timedelta(hours=24)


class GroupBroken(Exception):
    """gloo cannot reach a peer any more, or the group is closed."""


CONNECTION_LOST = (GroupBroken, dist.DistError)
"""Errors of a group or a rendezvous store whose other end is gone. Not `RuntimeError`, which torch and Python
also raise for many faults of this process."""


class Listener:
    """Rank 0's rendezvous socket, bound and listening before any member is told of it.

    TCPStore by itself would listen on all interfaces; with a bound socket, passed by descriptor, it uses one
    address.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.endpoint = f"{address}:{self._socket.getsockname()[1]}"
        self._store: _TCPStore | None = None

    def serve(self) -> _TCPStore:
        """The store on the socket, started the first time; it owns the descriptor from then on."""
        if self._store is None:
            host, port = split_endpoint(self.endpoint)
            self._store = _TCPStore(
                host,
                port,
                None,
                is_master=True,
                timeout=_FOREVER,
                wait_for_workers=False,
                master_listen_fd=self._socket.detach(),
                use_libuv=True,
            )
        return self._store

    def close(self) -> None:
        self._store = None
        self._socket.close()


def connect(endpoint: str, timeout_s: float = 60.0) -> _TCPStore:
    """Connect to the rendezvous store at `endpoint` (host:port). Raises `DistError` if it cannot be
    reached."""
    host, port = split_endpoint(endpoint)
    timeout = timedelta(seconds=timeout_s)
    store = _TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    store.set_timeout(_FOREVER)
    return store


def fetch(store: Store, key: str, unwanted: Callable[[], bool]) -> bytes:
    """Wait for the value of `key`. Raises `DistError` if the store is lost, or once `unwanted()`."""
    while True:
        try:
            store.wait([key], timedelta(seconds=_CHECK_S))
            return store.get(key)
        except dist.DistStoreError:  # not there yet
            if unwanted():
                raise


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def wait(work: dist.Work) -> None:
    """Block until the work is complete. Raises `GroupBroken`."""
    try:
        work.wait()
    except RuntimeError as error:  # gloo has no error type of its own
        raise GroupBroken(str(error)) from error


class ProcessGroup:
    """A process group over `ranks` of the generation; peers are named by their generation rank.

    All methods raise `GroupBroken` if a peer is gone, or the group is closed.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int], address: str) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._index = {member: index for index, member in enumerate(self.ranks)}
        self._group: Any = None
        self._is_alone = len(self.ranks) == 1
        if self._is_alone:
            return  # with one member, sums and maxima are the values themselves
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # pyright: ignore
        options._timeout = _FOREVER  # pyright: ignore
        prefix = _PrefixStore(name, store)
        try:
            self._group = dist.ProcessGroupGloo(prefix, self._index[rank], len(self.ranks), options)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error

    def sum(self, tensor: torch.Tensor) -> None:
        """All-reduce `tensor` in place by addition (64-bit integers wrap, as two's complement does)."""
        self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> None:
        """All-reduce `tensor` in place by the element-wise maximum."""
        self._all_reduce(tensor, dist.ReduceOp.MAX)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Send a contiguous host tensor; returns when the peer has received it."""
        wait(self.start_send(tensor, peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Fill a contiguous host tensor with what `peer` sends under `tag`."""
        wait(self.start_receive(tensor, peer, tag))

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Like `send`, but returns at once; do not modify the tensor until the work is complete."""
        return self._started("send", [tensor], self._index[peer], tag)

    def start_receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Like `receive`, but returns at once; the tensor is filled once the work is complete."""
        return self._started("recv", [tensor], self._index[peer], tag)

    def close(self) -> None:
        """Close the connections: threads blocked in this group, here or at a peer, get `GroupBroken`.

        Without this, threads that wait for a living peer, which waits likewise, would keep the group's
        sockets for ever. gloo's only way is a wait that times out, which closes all pairs of its group. A
        wait for a peer that is already lost fails at once and closes nothing, so every peer is tried.
        """
        if self._group is None:
            return
        for peer in self._index.values():
            if peer == self._index[self._rank]:
                continue
            try:
                self._group.recv([torch.empty(1)], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                log.debug("a group of ranks %s is closed: %s", self.ranks, error)

    def release(self) -> object:
        """Give up the connections: they close when the returned object is freed. That waits for gloo's loop,
        10 ms for each peer, so do it on a thread that nothing waits for."""
        group, self._group = self._group, None
        return group

    def _started(self, name: str, *arguments: Any) -> dist.Work:
        if self._group is None:
            raise GroupBroken(f"the group of ranks {self.ranks} is closed")
        try:
            return getattr(self._group, name)(*arguments)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self._is_alone:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        wait(self._started("allreduce", [tensor], options))
