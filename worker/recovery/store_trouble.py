"""Reports the store's messages to the manager while calls are retried."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("makara.store")


class StoreTrouble:
    """Thread-safe. `tell` gets the newest message, and an empty text when the trouble is over."""

    def __init__(self, doing: str, tell: Callable[[str], None]) -> None:
        """`doing`: what is being tried, for the log."""
        self._doing = doing
        self._tell = tell
        self._lock = threading.Lock()
        self._told = ""
        self._closed = False

    def tell(self, trouble: str) -> None:
        with self._lock:  # nothing may be told once `close` has returned
            if not self._closed:
                self._say(trouble)

    def close(self) -> None:
        """End the trouble, if any; abandoned threads report nothing more."""
        with self._lock:
            self._closed = True
            self._say("")

    def _say(self, trouble: str) -> None:
        if trouble == self._told:
            return
        self._told = trouble
        if trouble:
            log.warning("%s: %s", self._doing, trouble)
        self._tell(trouble)
