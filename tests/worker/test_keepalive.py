"""What the kernel is told about connections that may end without a word."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from makara.worker.keepalive import end_if_unanswered, keep_alive


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as end,
    ):
        yield end


def option(connection: socket.socket, name: str) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))


@pytest.mark.parametrize("bound_s", [4, 10, 60])
def test_silence_is_asked_about_and_ends_the_connection_within_the_bound(
    connection: socket.socket, bound_s: int
) -> None:
    keep_alive(connection, bound_s)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    asked_s = option(connection, "TCP_KEEPINTVL") * option(connection, "TCP_KEEPCNT")
    assert option(connection, "TCP_KEEPIDLE") + asked_s <= bound_s


def test_what_was_sent_is_to_be_acknowledged_within_the_bound(connection: socket.socket) -> None:
    end_if_unanswered(connection, 2.5)
    assert option(connection, "TCP_USER_TIMEOUT") == 2500


def test_a_system_without_an_option_does_without(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPALIVE"):
        monkeypatch.delattr(socket, name, raising=False)
    keep_alive(connection, 10)
    end_if_unanswered(connection, 10)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
