"""A sign-in that is made anew after it failed: libraries keep what they found, or that they found nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken, TokenCredential
from azure.core.exceptions import ClientAuthenticationError


class Renewed:
    """A credential made by `make`, and made again once it gave no token. Safe to use from several threads.

    One that gave tokens which Azure refuses is kept: it may be all that there is while the directory is away.
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
                if self._made is used:  # else another thread has seen to it
                    self._made = None
            raise
