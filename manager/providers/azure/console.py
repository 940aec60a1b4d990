"""The serial console of a VM, as Azure's boot diagnostics keep it in a blob."""

from __future__ import annotations

import httpx
from azure.mgmt.compute import ComputeManagementClient

from .. import ProviderError
from .prices import trusted
from .settings import AzureSettings

_MOST_BYTES = 8 << 10
_TIMEOUT_S = 30.0


def read_console(client: ComputeManagementClient, settings: AzureSettings, machine: str) -> str:
    """The end of a VM's console; empty while there is none. Raises `AzureError` and `ProviderError`."""
    found = client.virtual_machines.retrieve_boot_diagnostics_data(settings.resource_group, machine)
    address = found.serial_console_log_blob_uri  # signed: it grants read access, so it is never shown
    if not address:
        return ""
    try:
        with httpx.Client(verify=trusted(settings.ca_file), timeout=_TIMEOUT_S) as reader:
            answer = reader.get(address)
    except httpx.HTTPError as error:
        kind = type(error).__name__
        raise ProviderError(f"the console of {machine} cannot be read: {kind}") from None
    if answer.status_code == 404:
        return ""
    if answer.status_code != 200:
        raise ProviderError(f"the console of {machine} cannot be read: HTTP {answer.status_code}")
    return answer.content[-_MOST_BYTES:].decode(errors="replace")
