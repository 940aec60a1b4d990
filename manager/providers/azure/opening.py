"""From settings to a provider, with credentials from where Azure's own tools find them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from azure.identity import DefaultAzureCredential

from ....protocol.messages import BootConfig
from ...spec.placement import Attempt
from .credentials import Renewed
from .provider import AzureProvider
from .settings import AzureSettings


def open_azure(
    settings: AzureSettings, manager: str, render: Callable[[Attempt, BootConfig], bytes]
) -> AzureProvider:
    """Signs in as the environment says, as the manager's VM, or as who is signed in to `az`; with its first
    call, not here. With a `ca_file` the cloud is a private one, which Microsoft's directory does not know."""
    logging.getLogger("azure").setLevel(logging.WARNING)  # else each request is logged with its headers
    credential = Renewed(
        lambda: DefaultAzureCredential(
            connection_verify=settings.ca_file or True,
            disable_instance_discovery=settings.ca_file is not None,
        )
    )
    return AzureProvider(settings, manager, render, credential=credential)
