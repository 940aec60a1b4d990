"""When the kernel gives a TCP connection up: a cut link, or a machine that vanished, closes none by itself.

The kernels alone take part, so an end whose process is merely busy or stopped is no lost connection. What a
system does not offer (macOS has no `TCP_USER_TIMEOUT`) is left out.
"""

from __future__ import annotations

import socket

_PROBES = 3


def keep_alive(connection: socket.socket, bound_s: float) -> None:
    """Have the kernel ask the other end now and then, and end the connection after `bound_s` of silence.

    Kernels count in whole seconds, so that it takes 4 at least. It counts while nothing is on its
    way; see `end_if_unanswered` for when something is.
    """
    interval_s = max(1, round(bound_s / 5))
    idle_s = max(1, round(bound_s - _PROBES * interval_s))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the time until the first question TCP_KEEPALIVE.
    for name, value in (
        ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", idle_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
    ):
        _set(connection, name, value)


def end_if_unanswered(connection: socket.socket, bound_s: float) -> None:
    """Have the kernel end a connection on which what was sent is not acknowledged for `bound_s`."""
    _set(connection, "TCP_USER_TIMEOUT", round(1000 * bound_s))


def _set(connection: socket.socket, name: str, value: int) -> None:
    option: int | None = getattr(socket, name, None)
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
