"""Requests to Azure's resource manager, through Azure's own client, and the resources that it returns.

Only connections that could not be made are retried here. A request without an answer has an unknown outcome,
and a throttled one was not done: the caller decides whether and when to retry.
Network interfaces and addresses are requested through the same client by their paths: Azure's package for
networks is a hundred times as large as what is needed of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from azure.core import MatchConditions
from azure.core.credentials import TokenCredential
from azure.core.exceptions import DecodeError, HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.policies import RetryPolicy
from azure.core.polling import LROPoller
from azure.core.rest import HttpRequest, HttpResponse
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.core.exceptions import ARMErrorFormat
from azure.mgmt.core.polling.arm_polling import ARMPolling

from ...spec.placement import Market, Placement
from .settings import AzureSettings

Kind = Literal["vm", "interface", "disk", "address"]
KINDS: tuple[Kind, ...] = ("vm", "interface", "disk", "address")

_TYPES: dict[Kind, str] = {
    "vm": "Microsoft.Compute/virtualMachines",
    "interface": "Microsoft.Network/networkInterfaces",
    "disk": "Microsoft.Compute/disks",
    "address": "Microsoft.Network/publicIPAddresses",
}
_VERSIONS: dict[Kind, str] = {
    "vm": "2024-07-01",
    "interface": "2022-11-01",
    "disk": "2024-03-02",
    "address": "2022-11-01",
}
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Thing:
    """A resource as the resource manager returns it."""

    kind: Kind
    body: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def name(self) -> str:
        return str(self.body["name"])

    @property
    def tags(self) -> dict[str, str]:
        return self.body.get("tags") or {}

    @property
    def state(self) -> str:
        """Creating, Updating, Succeeded, Failed or Deleting."""
        return str(self._properties.get("provisioningState", ""))

    @property
    def created(self) -> str | None:
        return self._properties.get("timeCreated")

    @property
    def owner(self) -> str | None:
        """The id of the VM that a disk or an interface belongs to."""
        if self.kind == "interface":
            return (self._properties.get("virtualMachine") or {}).get("id")
        return self.body.get("managedBy")

    @property
    def placement(self) -> Placement | None:
        """A VM's type, zone and market. The zone is empty if Azure chose it."""
        if self.kind != "vm":
            return None
        return Placement(
            provider="azure",
            market=Market.SPOT if self._properties.get("priority") == "Spot" else Market.ON_DEMAND,
            region=str(self.body.get("location", "")),
            zone=next(iter(self.body.get("zones") or []), ""),
            instance_type=str((self._properties.get("hardwareProfile") or {}).get("vmSize", "")),
        )

    @property
    def private_address(self) -> str:
        """The private address of an interface."""
        if self.kind != "interface":
            return ""
        inner = [one.get("properties") or {} for one in self._properties.get("ipConfigurations") or []]
        return str(next((one["privateIPAddress"] for one in inner if one.get("privateIPAddress")), ""))

    @property
    def public_address(self) -> str:
        """The IP of an address resource."""
        return str(self._properties.get("ipAddress") or "") if self.kind == "address" else ""

    @property
    def codes(self) -> list[tuple[str, str]]:
        """A VM's statuses, as (`PowerState/running`, message)."""
        found = (self._properties.get("instanceView") or {}).get("statuses") or []
        return [(str(one.get("code", "")), str(one.get("message") or "")) for one in found]

    @property
    def _properties(self) -> dict[str, Any]:
        return self.body.get("properties") or {}


class ResourceGroup:
    """One resource group of one subscription. Every method raises `AzureError`."""

    def __init__(self, settings: AzureSettings, credential: TokenCredential, *, poll_s: float) -> None:
        self._settings = settings
        self._poll_s = poll_s
        self.client = ComputeManagementClient(
            credential,
            settings.subscription_id,
            settings.resource_manager,
            credential_scopes=[f"{settings.resource_manager.rstrip('/')}/.default"],
            retry_policy=RetryPolicy(retry_total=2, retry_connect=2, retry_read=0, retry_status=0),
            connection_verify=settings.ca_file or True,
            connection_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
        )

    def create(self, name: str, body: dict[str, Any]) -> LROPoller[Any]:
        """Begin to create a VM. Its name must be free (else HTTP 412)."""
        return self.client.virtual_machines.begin_create_or_update(
            self._settings.resource_group,
            name,
            cast(Any, body),
            match_condition=MatchConditions.IfMissing,
            polling=ARMPolling(timeout=self._poll_s),
        )

    def get(self, kind: Kind, name: str) -> Thing | None:
        """The resource, or None; a VM with its statuses."""
        expand = {"$expand": "instanceView"} if kind == "vm" else {}
        try:
            return Thing(kind, self._ask("GET", f"{self._folder(kind)}/{name}", kind, expand))
        except ResourceNotFoundError:
            return None

    def delete(self, kind: Kind, name: str) -> None:
        """Begin the deletion; a missing resource is no error. A VM gets no time to shut down."""
        force = {"forceDeletion": "true"} if kind == "vm" else {}
        try:
            self._ask("DELETE", f"{self._folder(kind)}/{name}", kind, force)
        except ResourceNotFoundError:
            return

    def list(self, kind: Kind) -> Iterator[Thing]:
        """All resources of a kind in the resource group, over all pages; VMs without their statuses.

        Azure takes `$expand=instanceView` for the list of a group only with a filter for scale sets
        (`learn.microsoft.com/rest/api/compute/virtual-machines/list`).
        """
        page = self._ask("GET", self._folder(kind), kind, {})
        while True:
            yield from (Thing(kind, body) for body in page.get("value", []))
            following = page.get("nextLink")
            if not following:
                return
            page = self._send(HttpRequest("GET", following))

    def close(self) -> None:
        self.client.close()

    def _folder(self, kind: Kind) -> str:
        settings = self._settings
        group = f"/subscriptions/{settings.subscription_id}/resourceGroups/{settings.resource_group}"
        return f"{group}/providers/{_TYPES[kind]}"

    def _ask(self, method: str, path: str, kind: Kind, parameters: dict[str, str]) -> dict[str, Any]:
        return self._send(HttpRequest(method, path, params={"api-version": _VERSIONS[kind], **parameters}))

    def _send(self, request: HttpRequest) -> dict[str, Any]:
        response = self.client.send_request(request)
        if response.status_code == 404:
            raise ResourceNotFoundError(response=response, error_format=ARMErrorFormat)
        if response.status_code >= 400:
            raise HttpResponseError(response=response, error_format=ARMErrorFormat)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise _unreadable(response) from error
        if not isinstance(answer, dict):
            raise _unreadable(response)
        return cast("dict[str, Any]", answer)


def _unreadable(response: HttpResponse) -> DecodeError:
    return DecodeError(f"an answer that is no JSON object (HTTP {response.status_code})", response=response)
