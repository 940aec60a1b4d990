"""The trainer's end of the pipe to its agent: orders in, reports and beats out.

One thread owns the socket. Its beats prove that the process runs and that nothing keeps the interpreter
lock; the agent kills a trainer whose beats stop for a lease. What they carry tells whether the compute thread
gets on. If the agent is gone the trainer ends at once:
nobody would order it about or end it.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from .messages import Orders, StepMetrics, WorkerReport
from .progress import Progress

log = logging.getLogger("makara.trainer")

BEAT_S = 0.5
AGENT_GONE = 70  # exit statuses
CONTROL_LOST = 71


class Control:
    """Thread-safe: the compute thread reports, the control thread reads orders and beats."""

    def __init__(
        self, connection: socket.socket, report: WorkerReport, on_orders: Callable[[Orders], None]
    ) -> None:
        self._socket = connection
        self._on_orders = on_orders
        self._report = report
        self.progress = Progress()
        self._send_lock = threading.Lock()
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
        """Have `wait_for` look again."""
        with self._changed:
            self._changed.notify_all()

    def report(self, **changes: Any) -> None:
        """Change fields of the worker's report and send it."""
        with self._send_lock:
            self._report = self._report.model_copy(update=changes)
            self._send({"report": self._report.model_dump(mode="json")})

    def metrics(self, metrics: StepMetrics) -> None:
        with self._send_lock:
            self._send({"metrics": metrics.model_dump(mode="json")})

    def _send(self, value: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(value).encode() + b"\n")
        except OSError:
            os._exit(AGENT_GONE)

    def _loop(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the control thread ends, and the trainer with it")
            os._exit(CONTROL_LOST)  # nobody would hear orders any more

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        pending = b""
        while True:
            if selector.select(timeout=BEAT_S):
                data = self._receive()
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._accept(Orders.model_validate_json(line))
            with self._send_lock:
                self._send({"beat": {"count": self.progress.count, "at": self.progress.at}})

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
