"""A server of nothing but TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from makara.manager.authority import Authority


@contextlib.contextmanager
def tls_server(authority: Authority) -> Iterator[tuple[str, int]]:
    """The address of a server that shakes hands, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), connection:
                    authority.context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
