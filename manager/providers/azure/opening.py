"""Opens the Azure provider, with credentials found as Azure's own tools do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken, TokenCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.identity import DefaultAzureCredential

from ....protocol.messages import BootConfig
from ...spec.placement import Attempt
from .provider import AzureProvider
from .settings import AzureSettings


def open_azure(
    settings: AzureSettings,
    manager: str,
    render: Callable[[Attempt, BootConfig], bytes],
    clock: Callable[[], float],
) -> AzureProvider:
    """Open the provider. It signs in at its first call, by the environment, as the manager's VM, or as the
    user of `az`. With a `ca_file` the cloud is a private one, unknown to Microsoft's directory."""
    logging.getLogger("azure").setLevel(logging.WARNING)  # else each request is logged with its headers
    credential = Renewed(
        lambda: DefaultAzureCredential(
            connection_verify=settings.ca_file or True,
            disable_instance_discovery=settings.ca_file is not None,
        )
    )
    return AzureProvider(settings, manager, render, credential=credential, clock=clock)


class Renewed:
    """A credential from `make`, made again after it gave no token: Azure's libraries cache what they found,
    even nothing. Thread-safe.

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
