"""The request that creates a VM, and names and tags of its resources.

The form is that of `learn.microsoft.com/rest/api/compute/virtual-machines/create-or-update`: interface and
disk are described in the VM's own request, so that Azure creates and deletes them with it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...spec.placement import Attempt, Market
from .. import NotAllowed
from .settings import AzureSettings

MANAGER_TAG = "makara-manager"
VM_TAG = "makara-vm"
ATTEMPT_TAG = "makara-attempt"

_NETWORK_API = "2022-11-01"  # the newest that VM requests accept
# For a Linux VM's name, and its computerName. Interfaces, disks and addresses may have 80.
_LONGEST_NAME = 64
_DIGEST = 12  # characters
_MOST_USER_DATA = 64 << 10  # bytes, before base64
_USER = "makara"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of one attempt's VM and its parts; unique per manager."""

    manager: str
    vm: str
    number: int

    @property
    def machine(self) -> str:
        end = f"-{self.number}-{self.manager}"
        return _short(self.vm, _LONGEST_NAME - len(end)) + end

    @property
    def interface(self) -> str:
        return f"{self.machine}-nic"

    @property
    def disk(self) -> str:
        return f"{self.machine}-disk"

    @property
    def address(self) -> str:
        return f"{self.machine}-ip"


def _short(vm: str, longest: int) -> str:
    """The name; a long one is cut and ends in a digest, so that it stays unique."""
    if len(vm) <= longest:
        return vm
    digest = hashlib.sha256(vm.encode()).hexdigest()[:_DIGEST]
    return f"{vm[: longest - _DIGEST - 1].rstrip('-')}-{digest}"


def names_of(manager: str, attempt: Attempt) -> Names:
    return Names(manager=manager, vm=attempt.vm, number=attempt.number)


def names_of_thing(manager: str, name: str, tags: Mapping[str, str]) -> Names | None:
    """The attempt of `manager` to which a thing belongs, by its tags, else by its name.

    A shortened name gives a shortened VM name, whose own names are the same.
    """
    match = re.fullmatch(rf"(.+)-(\d{{1,9}})-{re.escape(manager)}(?:-(?:nic|disk|ip))?", name)
    if tags.get(MANAGER_TAG) == manager and tags.get(ATTEMPT_TAG, "").isdecimal() and tags.get(VM_TAG):
        return Names(manager=manager, vm=tags[VM_TAG], number=int(tags[ATTEMPT_TAG]))
    if match is None or tags.get(MANAGER_TAG, manager) != manager:
        return None
    return Names(manager=manager, vm=match[1], number=int(match[2]))


def tags_of(manager: str, attempt: Attempt) -> dict[str, str]:
    return {MANAGER_TAG: manager, VM_TAG: attempt.vm, ATTEMPT_TAG: str(attempt.number)}


def vm_request(
    settings: AzureSettings, manager: str, attempt: Attempt, user_data: bytes, public_key: str
) -> dict[str, Any]:
    """The body of the request. Raises `NotAllowed` for values that Azure does not accept."""
    if len(user_data) > _MOST_USER_DATA:
        raise NotAllowed(f"user data has {len(user_data)} bytes; Azure takes {_MOST_USER_DATA}")
    placement, names = attempt.placement, names_of(manager, attempt)
    body: dict[str, Any] = {
        "location": settings.region,
        "tags": tags_of(manager, attempt),
        "properties": {
            "hardwareProfile": {"vmSize": placement.instance_type},
            "storageProfile": _storage(settings, attempt, names),
            "osProfile": _system(names, user_data, public_key),
            "networkProfile": _network(settings, names, tags_of(manager, attempt)),
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
            **_market(attempt),
        },
    }
    if placement.zone:
        body["zones"] = [placement.zone]
    identities = {name: {} for name in (settings.identity_id, settings.store_identity_id) if name is not None}
    if identities:
        body["identity"] = {"type": "UserAssigned", "userAssignedIdentities": identities}
    return body


def _market(attempt: Attempt) -> dict[str, Any]:
    if attempt.placement.market is Market.ON_DEMAND:
        return {"priority": "Regular"}
    bid = -1.0 if attempt.max_price is None else attempt.max_price  # -1: up to the on-demand price
    return {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": bid}}


def _storage(settings: AzureSettings, attempt: Attempt, names: Names) -> dict[str, Any]:
    disk: dict[str, Any] = {
        "name": names.disk,
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "managedDisk": {"storageAccountType": settings.disk_type},
    }
    size_gb = attempt.disk_gb or settings.disk_gb
    if size_gb is not None:
        disk["diskSizeGB"] = size_gb
    return {"imageReference": _image(attempt.image or settings.image), "osDisk": disk}


def _image(image: str) -> dict[str, str]:
    if image.startswith("/"):
        return {"id": image}
    parts = image.split(":")
    if len(parts) != 4 or not all(parts):
        raise NotAllowed(f"image: {image!r} is neither publisher:offer:sku:version nor a resource's id")
    return dict(zip(("publisher", "offer", "sku", "version"), parts, strict=True))


def _system(names: Names, user_data: bytes, public_key: str) -> dict[str, Any]:
    key = {"path": f"/home/{_USER}/.ssh/authorized_keys", "keyData": public_key}
    return {
        "computerName": names.machine,
        "adminUsername": _USER,
        "customData": base64.b64encode(user_data).decode(),
        "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": [key]}},
    }


def _network(settings: AzureSettings, names: Names, tags: dict[str, str]) -> dict[str, Any]:
    inner: dict[str, Any] = {"primary": True, "subnet": {"id": settings.subnet_id}}
    if settings.public_address:
        inner["publicIPAddressConfiguration"] = {
            "name": names.address,
            "sku": {"name": "Standard", "tier": "Regional"},
            "tags": tags,
            "properties": {"deleteOption": "Delete", "publicIPAllocationMethod": "Static"},
        }
    interface: dict[str, Any] = {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": [{"name": "primary", "properties": inner}],
    }
    if settings.security_group_id is not None:
        interface["networkSecurityGroup"] = {"id": settings.security_group_id}
    return {
        "networkApiVersion": _NETWORK_API,
        "networkInterfaceConfigurations": [{"name": names.interface, "tags": tags, "properties": interface}],
    }


def key_of_nobody() -> str:
    """A public key without a private half, so that nobody can sign in: Azure requires one per Linux VM."""
    public = Ed25519PrivateKey.generate().public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
