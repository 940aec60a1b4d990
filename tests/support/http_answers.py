"""A small HTTP server whose answers a function gives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    content_type: str = "application/xml"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    num_missing: int = 0  # bytes that are announced, and not sent before the connection is closed


@contextmanager
def answering(answer: Callable[[Request], Answer], listener: socket.socket | None = None) -> Iterator[str]:
    """Serve on `listener`, or on a free port of loopback; gives the address `http://HOST:PORT`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # answers `Expect: 100-continue`, for which clients wait a second

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = answer(Request(self.command, self.path, dict(self.headers), body))
            content = given.text.encode()
            self.send_response(given.status)
            self.send_header("Content-Type", given.content_type)
            self.send_header("Content-Length", str(len(content) + given.num_missing))
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.close_connection |= given.num_missing > 0

        do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with listener or socket.create_server(("127.0.0.1", 0)) as listening:
        server = ThreadingHTTPServer(listening.getsockname(), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            host, port = listening.getsockname()
            yield f"http://{host}:{port}"
        finally:
            server.shutdown()
            thread.join()
