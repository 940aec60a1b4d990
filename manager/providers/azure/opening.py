"""Opens the Azure provider, with credentials found as Azure's own tools do."""

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
