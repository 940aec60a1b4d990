"""A sign-in that is made anew after it failed: libraries keep what they found, or that they found nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken, TokenCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.core.pipeline import PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import SansIOHTTPPolicy

_NOT_SIGNED_IN = 401


class Renewed:
    """A credential made by `make`, and made again once it or its token was refused. Safe to use from several
    threads."""

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
            self.forget(used)
            raise

    def forget(self, used: TokenCredential | None = None) -> None:
        """`used`: unless it was made anew since."""
        with self._lock:
            if used is None or self._made is used:
                self._made = None


class ForgetRefused(SansIOHTTPPolicy[Any, Any]):
    """Part of a client: has a credential forgotten whose token the cloud does not take."""

    def __init__(self, credential: Renewed) -> None:
        super().__init__()
        self._credential = credential

    def on_response(self, request: PipelineRequest[Any], response: PipelineResponse[Any, Any]) -> None:
        if response.http_response.status_code == _NOT_SIGNED_IN:
            self._credential.forget()
