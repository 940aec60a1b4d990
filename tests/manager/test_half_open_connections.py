"""A manager process whose peers open connections and say nothing: it goes on, and writes little about it."""

from __future__ import annotations

import resource
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from makara.manager.config import ServerConfig
from makara.manager.log_limit import log_to_stderr
from makara.manager.server import serve
from managers import Manager, release_all

HALF_A_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


@contextmanager
def files(soft: int) -> Iterator[None]:
    """This process may have this many files open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(before[0], soft), before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def serve_with_few_files(config: ServerConfig, ready: Connection, soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    log_to_stderr()
    serve(config, on_ready=lambda url, token: ready.send((url, token)))


class Peers:
    """`number` connections that say half a request; those that the manager ends are opened again."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self.address, self.number = address, number
        self.selector = selectors.DefaultSelector()

    def keep_open(self) -> None:
        for key, _ in self.selector.select(timeout=0):
            self.selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        while len(self.selector.get_map()) < self.number:
            peer = socket.socket()
            peer.setblocking(False)
            with suppress(BlockingIOError):
                peer.connect(self.address)
            with suppress(OSError):  # not connected yet: an idle one does as well
                peer.send(HALF_A_REQUEST)
            self.selector.register(peer, selectors.EVENT_READ)

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


@pytest.mark.parametrize(
    ("soft", "hard", "number", "seconds"),
    [
        pytest.param(256, 1024, 700, 6.0, id="short"),
        pytest.param(1024, 4096, 3000, 120.0, id="long", marks=pytest.mark.soak),
    ],
)
def test_agents_do_not_notice_half_open_connections_and_the_log_stays_small(
    tmp_path: Path, soft: int, hard: int, number: int, seconds: float
) -> None:
    manager = Manager(tmp_path / "home", run=serve_with_few_files, arguments=(soft, hard)).start()
    assert manager.process is not None
    host, _, port = manager.url.removeprefix("http://").partition(":")
    peers = Peers((host, int(port)), number)
    try:
        changes = {"training": {"steps": 1_000_000}, "resources": {"max_nodes": 1}}
        job = manager.submit(tmp_path / "store", **changes).json()["job"]
        first = manager.wait(job, lambda view: view["step"] >= 3)
        with files(number + 500):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                peers.keep_open()
                time.sleep(0.1)
            now = manager.wait(job, lambda view: view["step"] > first["step"])
            peers.close()
        assert now["status"] == "running"
        assert now["generation"] == first["generation"]
        log = Path(f"{manager.home}.log").read_text()
        assert "connection closed" not in log
        assert len(log) < 1_000_000
        limits = Path(f"/proc/{manager.process.pid}/limits").read_text()
        assert [line.split()[3:5] for line in limits.splitlines() if "open files" in line] == [
            [str(hard)] * 2
        ]
    finally:
        manager.kill()
        release_all(manager.home)
