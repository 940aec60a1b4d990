"""TCP keep-alive, so that the kernel notices a cut link or a vanished machine, which close no connection.

Only the kernels take part, so a peer whose process is busy or stopped does not lose its connection. Options
that a system does not offer (macOS has no `TCP_USER_TIMEOUT`) are left out.
"""

from __future__ import annotations

import socket

_PROBES = 3


def keep_alive(connection: socket.socket, bound_s: float) -> None:
    """Have the kernel probe the other end, and end the connection after `bound_s` of silence.

    Kernels count in whole seconds, so the least is 4. Applies while no sent data is unacknowledged; for that
    see `end_if_unanswered`.
    """
    interval_s = max(1, round(bound_s / 5))
    idle_s = max(1, round(bound_s - _PROBES * interval_s))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the time until the first probe TCP_KEEPALIVE.
    for name, value in (
        ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", idle_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
    ):
        _set(connection, name, value)


def end_if_unanswered(connection: socket.socket, bound_s: float) -> None:
    """Have the kernel end a connection on which sent data is not acknowledged for `bound_s`."""
    _set(connection, "TCP_USER_TIMEOUT", round(1000 * bound_s))


def _set(connection: socket.socket, name: str, value: int) -> None:
    option: int | None = getattr(socket, name, None)
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
