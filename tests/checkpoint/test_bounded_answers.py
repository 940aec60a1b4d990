"""A job names its store: whatever that answers, a call ends in bounded time and memory."""

from __future__ import annotations

import base64
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from makara.checkpoint import Store, StoreRefused, StoreUnavailable, open_store
from makara.checkpoint.manifest import CheckpointPart
from makara.checkpoint.reader import fetch_part
from makara.checkpoint.stores.bounded_http import MOST_RECORD_BYTES, Bounds, bounded
from makara.checkpoint.stores.credentials import AzureCredentials, S3Credentials

Answer = Callable[[socket.socket], None]
OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nETag: "a"\r\nx-ms-blob-type: BlockBlob\r\n'
GIB = 1 << 30


def dripping_body(peer: socket.socket) -> None:
    peer.sendall(OK + b"Content-Length: 1000000\r\n\r\n")
    drip(peer)


def dripping_headers(peer: socket.socket) -> None:
    peer.sendall(OK + b"X-Long: ")
    drip(peer)


def dripping_error(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 1000000\r\n\r\n")
    drip(peer)


def drip(peer: socket.socket) -> None:
    while True:
        time.sleep(0.02)
        peer.sendall(b" ")


def huge(peer: socket.socket) -> None:
    peer.sendall(OK + b"Content-Length: %d\r\n\r\n" % (8 * GIB))
    flood(peer)


def endless(peer: socket.socket) -> None:
    peer.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    flood(peer, b"100000\r\n" + b" " * 0x100000 + b"\r\n")


def huge_error(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % (8 * GIB))
    flood(peer)


def packed(peer: socket.socket) -> None:
    """A gibibyte in a megabyte, as far as the reader can know."""
    peer.sendall(OK + b"Content-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"\x1f\x8b" + b"\0" * 18)


def endless_pages(peer: socket.socket) -> None:
    """Each page of a listing says that there is another one."""
    page = (
        b"<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated><MaxKeys>1000</MaxKeys>"
        b"<NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    peer.sendall(OK + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(page) + page)


def flood(peer: socket.socket, piece: bytes = b" " * (1 << 20)) -> None:
    while True:
        peer.sendall(piece)


@contextmanager
def server(answer: Answer) -> Iterator[int]:
    """Answers each request with `answer`; yields its port."""

    def serve(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.recv(65536)
            answer(peer)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept, args=(listener,), daemon=True)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def store_at(kind: str, port: int) -> Store:
    if kind == "s3":
        keys = S3Credentials("a", "b", None)
        return open_store(
            "s3://bucket/p", endpoint=f"http://127.0.0.1:{port}", region="us-east-1", credentials=keys
        )
    keys = AzureCredentials(key=base64.b64encode(b"k").decode())
    return open_store("az://bucket/p", endpoint=f"http://127.0.0.1:{port}/account", credentials=keys)


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("job/head.json"),
    "read_tagged": lambda store: store.read_tagged("job/head.json"),
    "get_range": lambda store: store.get_range("job/part", 0, 1000),
    "list": lambda store: list(store.list("job/")),
    "put": lambda store: store.put("job/part", b"x"),
    "swap": lambda store: store.swap("job/head.json", b"x", None),
    "unfinished": lambda store: list(store.unfinished("job/")),
    "delete": lambda store: store.delete("job/part"),
}
WITHOUT_A_BODY = ("put", "swap", "delete")  # answers of which some clients do not read the body


@pytest.mark.parametrize("kind", ["s3", "az"])
@pytest.mark.parametrize("answer", [dripping_body, dripping_headers, dripping_error])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_though_its_answer_does_not(kind: str, answer: Answer, call: str) -> None:
    with server(answer) as port:
        store = store_at(kind, port)
        refused = (StoreUnavailable, StoreRefused)
        with bounded(Bounds(0.3, 1 << 20, 1 << 20)):
            if call in WITHOUT_A_BODY:
                with suppress(*refused):
                    CALLS[call](store)
            else:
                with pytest.raises(refused):
                    CALLS[call](store)


@pytest.mark.parametrize("kind", ["s3", "az"])
@pytest.mark.parametrize("answer", [huge, endless, huge_error])
@pytest.mark.parametrize("call", ["get", "read_tagged", "get_range", "list", "unfinished"])
def test_an_answer_that_is_larger_than_what_was_asked_for_is_not_read(
    kind: str, answer: Answer, call: str
) -> None:
    with server(answer) as port:
        store = store_at(kind, port)
        tracemalloc.start()
        try:
            with pytest.raises((StoreRefused, StoreUnavailable)):
                CALLS[call](store)
            assert tracemalloc.get_traced_memory()[1] < 6 * MOST_RECORD_BYTES
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("kind", ["s3", "az"])
def test_an_answer_is_not_unpacked(kind: str) -> None:
    with server(packed) as port, pytest.raises(StoreRefused, match="gzip"):
        store_at(kind, port).get("job/head.json")


def test_a_listing_without_an_end_ends() -> None:
    bounds = Bounds(60.0, 100_000, 100_000)
    with server(endless_pages) as port, bounded(bounds), pytest.raises(StoreRefused, match="larger"):
        list(store_at("s3", port).list("job/"))


def test_a_large_file_is_no_record(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    with (tmp_path / "head.json").open("wb") as file:
        file.truncate(8 * GIB)
    with pytest.raises(StoreRefused, match="no record"):
        store.get("head.json")


def test_a_part_that_is_larger_than_the_disk_is_not_fetched(tmp_path: Path) -> None:
    part = CheckpointPart(0, 0, "job/part", size_bytes=1 << 60, sha256="0" * 64, tensors=())
    with pytest.raises(StoreRefused, match="left"):
        fetch_part(open_store(tmp_path.as_uri()), part, tmp_path / "part")
