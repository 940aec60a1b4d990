"""The trainer's end of the pipe to its agent: orders in, reports and beats out.

One thread reads orders and sends beats. Beats prove that the process runs and that nothing holds the
interpreter lock; the agent kills a trainer whose beats stop for a lease. They carry the compute thread's
progress; that thread never waits for the agent (see `outbox`). If the agent is gone the trainer exits at
once, since nothing would give it orders or end it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...protocol.frames import read_from_agent
from ...protocol.messages import Orders, StepMetrics, WorkerReport
from ..progress import ProgressCounters
from .outbox import Outbox

log = logging.getLogger("makara.trainer")
T = TypeVar("T")

BEAT_S = 0.5
AGENT_GONE = 70  # exit statuses
CONTROL_LOST = 71


class AgentPipe:
    """Thread-safe. The compute thread reports without waiting; the control thread reads orders, sends beats,
    and sends what had to wait for room in the socket."""

    def __init__(
        self, connection: socket.socket, report: WorkerReport, on_orders: Callable[[Orders], None]
    ) -> None:
        self._socket = connection
        self._on_orders = on_orders
        self._report = report
        self.progress = ProgressCounters()
        self._outbox = Outbox(connection)
        self._woken, self._waker = socket.socketpair()  # wakes the control thread when something waits
        self._reporting = threading.Lock()
        self._changed = threading.Condition()
        self._orders: Orders | None = None

    def start(self) -> None:
        self.report()
        threading.Thread(target=self._loop, name="control", daemon=True).start()

    @property
    def orders(self) -> Orders | None:
        return self._orders

    @property
    def last_report(self) -> WorkerReport:
        return self._report

    def wait_for(self, wanted: Callable[[Orders], bool]) -> Orders:
        """Block until the newest orders satisfy `wanted`, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders is not None and wanted(self._orders))
            assert self._orders is not None
            return self._orders

    def wake(self) -> None:
        """Have `wait_for` check again."""
        with self._changed:
            self._changed.notify_all()

    def report(self, **changes: Any) -> None:
        """Change fields of the worker's report, and send it as soon as the agent reads."""
        with self._reporting:
            self._report = self._report.model_copy(update=changes)
            self._tell(self._outbox.put_report, self._report)

    def metrics(self, metrics: StepMetrics) -> None:
        self._tell(self._outbox.put_metrics, metrics)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent to the agent, for at most `timeout_s`."""
        self._outbox.flush(timeout_s)

    def _tell(self, put: Callable[[T], bool], value: T) -> None:
        if not self._put(put, value):
            with contextlib.suppress(BlockingIOError):  # it has been woken already
                self._waker.send(b"!", socket.MSG_DONTWAIT)

    def _put(self, put: Callable[[T], bool], value: T) -> bool:
        try:
            return put(value)
        except OSError:
            os._exit(AGENT_GONE)

    def _loop(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the control thread ends, and the trainer with it")
            os._exit(CONTROL_LOST)  # no thread would read orders any more

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        pending = b""
        while True:
            ready = {key.fileobj: events for key, events in selector.select(timeout=BEAT_S)}
            if self._woken in ready:
                self._woken.recv(1 << 16)
            if ready.get(self._socket, 0) & selectors.EVENT_READ:
                *lines, pending = (pending + self._receive()).split(b"\n")
                for line in lines:
                    self._accept(read_from_agent(line))
            all_told = self._put(
                self._outbox.put_beat, {"count": self.progress.count, "at": self.progress.at}
            )
            waits = 0 if all_told else selectors.EVENT_WRITE
            selector.modify(self._socket, selectors.EVENT_READ | waits)

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:  # an agent that dies with beats unread resets the connection
            data = b""
        if not data:
            os._exit(AGENT_GONE)
        return data

    def _accept(self, orders: Orders) -> None:
        with self._changed:
            self._orders = orders  # the agent passes on only what counts, and in order
            self._changed.notify_all()
        self._on_orders(orders)
