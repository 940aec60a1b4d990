"""Ends a VM from inside: once its manager has released or refused it, or was not seen for too long.

A VM is billed until it is gone, whether or not its agent runs, so failures are retried without limit.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from ...protocol.messages import VmEnding
from .backoff import Backoff
from .notices.metadata import Metadata, read_object
from .notices.notice import Unanswered

log = logging.getLogger("makara.agent")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_DELETED_S = 300.0  # after which an accepted deletion is requested again
_TIMEOUT_S = 30.0
_POWER_OFF = ("systemctl", "poweroff")
_COMPUTE, _COMPUTE_VERSION = "/metadata/instance/compute", "2021-02-01"
_TOKEN, _TOKEN_VERSION = "/metadata/identity/oauth2/token", "2018-02-01"
_VMS_VERSION = "2024-07-01"
_ACCEPTED = (200, 202, 204)


async def end_vm(ending: VmEnding) -> None:
    """End the VM in its way. For a VM that deletes itself, this never returns."""
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    while ending.kind != "exit":
        try:
            if ending.kind == "power_off":
                await _power_off()
                return
            await _delete_azure(ending)
            log.info("Azure deletes this VM")
            await asyncio.sleep(_DELETED_S)
        except (Unanswered, OSError) as error:
            log.error("this VM cannot end itself yet: %s", error)
            await asyncio.sleep(backoff.next_s())


async def _power_off() -> None:
    """Power off. AWS then terminates the instance, if it was created so."""
    process = await asyncio.create_subprocess_exec(*_POWER_OFF)
    status = await process.wait()
    if status:
        raise OSError(f"{' '.join(_POWER_OFF)}: exit status {status}")


async def _delete_azure(ending: VmEnding) -> None:
    """Have Azure delete this VM, with its own identity, because a VM that is only shut down is billed on.

    learn.microsoft.com: managed-identities-azure-resources/how-to-use-vm-token, rest/api/compute/
    virtual-machines/delete.
    """
    metadata = Metadata(ending.metadata_url, _TIMEOUT_S)
    try:
        compute = await _ask(metadata, _COMPUTE, {"api-version": _COMPUTE_VERSION})
        named = {"client_id": ending.client_id, "msi_res_id": ending.identity_id}
        identity = {name: value for name, value in named.items() if value}
        params = {"api-version": _TOKEN_VERSION, "resource": f"{ending.management_url}/", **identity}
        token = await _ask(metadata, _TOKEN, params)
        resource, secret = compute.get("resourceId"), token.get("access_token")
    finally:
        await metadata.close()
    if not isinstance(resource, str) or not isinstance(secret, str):
        raise Unanswered("the metadata service gives no resourceId, or no access_token")
    await _delete(ending.management_url + resource, secret)


async def _ask(metadata: Metadata, path: str, params: dict[str, str]) -> dict[str, Any]:
    return read_object(await metadata.ask("GET", path, headers={"Metadata": "true"}, params=params))


async def _delete(url: str, token: str) -> None:
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            headers = {"Authorization": f"Bearer {token}"}
            response = await client.delete(url, params={"api-version": _VMS_VERSION}, headers=headers)
    except httpx.HTTPError as error:
        raise Unanswered(f"DELETE {url}: {error!r}") from error
    if response.status_code not in _ACCEPTED:
        raise Unanswered(f"DELETE {url}: HTTP {response.status_code}: {response.text[:500]}")
