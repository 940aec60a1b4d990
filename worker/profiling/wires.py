"""Connections, measured: inside this machine, where there is no other."""

from __future__ import annotations

import socket
import threading
import time

from ...simulator.calibration.links import MeasuredWire
from ...simulator.calibration.statistics import summarise

_ROUND_TRIPS = 30
_BULKS = 5
_BULK_BYTES = 4 << 20


def loopback() -> MeasuredWire:
    """Latency and bandwidth of a TCP connection inside this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server,), name="loopback-echo", daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small = [_round_trip_s(connection, 1) for _ in range(_ROUND_TRIPS)]
            large = [_round_trip_s(connection, _BULK_BYTES) for _ in range(_BULKS)]
        echo.join()
    latency = summarise([seconds / 2 for seconds in small])
    bulk = [_BULK_BYTES / max(seconds - 2 * latency.median, 1e-6) for seconds in large]
    return MeasuredWire(
        same_vm=True, latency_s=latency, bytes_per_s=summarise(bulk), loaded=False, source="loopback"
    )


def _round_trip_s(connection: socket.socket, size_bytes: int) -> float:
    """Seconds to send `size_bytes` and get one byte back."""
    started = time.perf_counter()
    connection.sendall(size_bytes.to_bytes(8, "big") + bytes(size_bytes))
    if not connection.recv(1):
        raise ConnectionError("the loopback probe was closed")
    return time.perf_counter() - started


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(b"\x01")
