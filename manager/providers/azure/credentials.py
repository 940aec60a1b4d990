"""A credential that is made again after it failed: Azure's libraries cache what they found, even nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken, TokenCredential
from azure.core.exceptions import ClientAuthenticationError


class Renewed:
    """A credential from `make`, made again after it gave no token. Thread-safe.

    A credential whose tokens Azure refuses is kept: while Azure's directory is down there may be no other.
    """

    def __init__(self, make: Callable[[], TokenCredential]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: TokenCredential | None = None

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            used = self._made
        try:
            return used.get_token(*scopes, **options)
        except ClientAuthenticationError:
            with self._lock:
                if self._made is used:  # else another thread has replaced it
                    self._made = None
            raise
