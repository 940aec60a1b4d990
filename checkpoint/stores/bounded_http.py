"""HTTP connections whose answers are bounded in time and size (checked with urllib3 2.8, Python 3.11).

A job names its store, so that whoever may submit a job decides what answers the manager. Timeouts of a socket
bound silence only: a server that sends a byte now and then, or 8 GiB where a record was expected, would hold
a thread and the memory of the process. So every byte of an answer, headers included, is read through
`_Bounded`, which counts against the innermost `bounded` block of the reading thread and those around it.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from .store import MOST_RECORD_BYTES

_SMALL_BYTES = 4 << 20  # a page of a listing has 1000 keys of 1 KiB at most
_HEADER_BYTES = 256 << 10
_CALL_S = 60.0
_SLOWEST = 20_000  # bytes per second; a store that is slower is taken as one that does not answer


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all answers of one call may take together, and how large each may be."""

    seconds: float
    num_bytes: int
    most_of_one: int


SMALL = Bounds(_CALL_S, _SMALL_BYTES, _SMALL_BYTES)  # of a call that asks for no object
RECORD = Bounds(_CALL_S, MOST_RECORD_BYTES + _SMALL_BYTES, MOST_RECORD_BYTES)
LISTING = Bounds(10 * _CALL_S, 128 << 20, _SMALL_BYTES)  # also of calls for many objects


def transfer(num_bytes: int, *, answer_bytes: int | None = None) -> Bounds:
    """The bounds of a call that moves `num_bytes`, which are in its answer (`answer_bytes` None) or not."""
    most = num_bytes if answer_bytes is None else answer_bytes
    return Bounds(_CALL_S + num_bytes / _SLOWEST, most + _SMALL_BYTES, most + _SMALL_BYTES)


class AnswerTooLarge(Exception):
    """A server sends more than was asked for; the message says how much that may be."""


@dataclass(eq=False)
class _Budget:
    ends_at: float  # monotonic seconds
    bytes_left: int
    most_of_one: int  # bytes of one answer
    outer: _Budget | None

    @classmethod
    def of(cls, bounds: Bounds, outer: _Budget | None = None) -> _Budget:
        return cls(time.monotonic() + bounds.seconds, bounds.num_bytes, bounds.most_of_one, outer)

    def remaining_s(self) -> float:
        here = self.ends_at - time.monotonic()
        return here if self.outer is None else min(here, self.outer.remaining_s())

    def spend(self, num_bytes: int) -> None:
        """Raises `AnswerTooLarge`."""
        self.bytes_left -= num_bytes
        if self.bytes_left < 0:
            raise AnswerTooLarge("the answers are larger than anything that Makara asks for")
        if self.outer is not None:
            self.outer.spend(num_bytes)


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def bounded(bounds: Bounds) -> Generator[None]:
    """Bound all answers that this thread reads in this block.

    Reads raise `TimeoutError` and `AnswerTooLarge`. Blocks may be nested; each bounds those inside it.
    """
    token = _BUDGET.set(_Budget.of(bounds, _BUDGET.get()))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class _Bounded(io.RawIOBase):
    """The bytes of one answer, from `raw`."""

    def __init__(self, raw: Any, connected: Any) -> None:
        self._raw = raw
        self._socket = connected
        self._silence_s = connected.gettimeout()
        self._num_bytes = 0
        # Of a thread that a client has made for itself, which is in no block.
        self._own = _Budget.of(SMALL)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        budget = _BUDGET.get() or self._own
        left_s = budget.remaining_s()
        if left_s <= 0:
            raise TimeoutError("the answer does not end")
        silence_s = left_s if self._silence_s is None else min(self._silence_s, left_s)
        self._socket.settimeout(silence_s)
        try:
            read = self._raw.readinto(buffer)
        finally:
            self._socket.settimeout(self._silence_s)
        self._num_bytes += read or 0
        budget.spend(read or 0)
        if self._num_bytes > budget.most_of_one + _HEADER_BYTES:
            raise AnswerTooLarge(f"an answer is larger than {budget.most_of_one} bytes")
        return read

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer that is read within bounds, and not encoded: a few bytes could unpack to gigabytes."""

    def __init__(self, sock: socket.socket, *args: Any, **others: Any) -> None:
        super().__init__(sock, *args, **others)
        unbounded: Any = self.fp
        self.fp = io.BufferedReader(_Bounded(unbounded.detach(), sock))

    def begin(self) -> None:
        super().begin()
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity", "aws-chunked"):
            raise AnswerTooLarge(f"an answer is encoded ({encoding[:50]!r}), which was not asked for")
        budget = _BUDGET.get()
        most = SMALL.most_of_one if budget is None else budget.most_of_one
        if self.length is not None and self.length > most:  # memory for all of it would be allocated at once
            raise AnswerTooLarge(f"an answer has {self.length} bytes, more than {most}")


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls: Any = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls: Any = _TlsConnection


class BoundedPools(urllib3.PoolManager):
    """Pools of connections whose answers are bounded."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
