"""Sends a trainer's messages to its agent without ever waiting for it.

An agent may be stopped for minutes and read nothing. Once the socket is full, a newer report replaces the
waiting one, likewise a newer beat, and if too many metrics wait, the oldest are dropped. The trainer goes on
computing.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from typing import Any

from ...protocol.messages import StepMetrics, WorkerReport

_MOST_METRICS = 10_000


class Outbox:
    """Thread-safe. Each `put_` sends as much as there is room for; call `send` for the rest when the socket
    is writable."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._changed = threading.Condition()
        self._report: WorkerReport | None = None
        self._beat: dict[str, Any] | None = None
        self._metrics: deque[StepMetrics] = deque(maxlen=_MOST_METRICS)
        self._sending = b""  # the rest of the message being sent

    def put_report(self, report: WorkerReport) -> bool:
        """Send the worker's newest report. Returns whether all was sent, as do the others."""
        with self._changed:
            self._report = report
            return self.send()

    def put_metrics(self, metrics: StepMetrics) -> bool:
        with self._changed:
            self._metrics.append(metrics)
            return self.send()

    def put_beat(self, beat: dict[str, Any]) -> bool:
        with self._changed:
            self._beat = beat
            return self.send()

    def send(self) -> bool:
        """Send as much as the socket accepts; returns whether that was all. Raises `OSError` if it fails."""
        with self._changed:
            while self._sending or self._take():
                try:
                    sent = self._socket.send(self._sending, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                self._sending = self._sending[sent:]
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> None:
        """Wait until all is sent, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waits, timeout_s)

    @property
    def _waits(self) -> bool:
        return bool(self._sending or self._report or self._beat or self._metrics)

    def _take(self) -> bool:
        """Begin the next message; returns False if there is none."""
        if self._report is not None:
            value: dict[str, Any] = {"report": self._report.model_dump(mode="json")}
            self._report = None
        elif self._beat is not None:
            value, self._beat = {"beat": self._beat}, None
        elif self._metrics:
            value = {"metrics": self._metrics.popleft().model_dump(mode="json")}
        else:
            return False
        self._sending = json.dumps(value).encode() + b"\n"
        return True
