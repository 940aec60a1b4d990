"""What a stand-in of Azure holds: resources that are made, fail, are evicted and deleted, step by step.

Written from the published description: `learn.microsoft.com/rest/api/compute/virtual-machines`,
`.../azure-resource-manager/management/async-operations` and the pages that `providers/azure/errors.py` names.
Nothing happens by time: whatever is under way goes on by one step each time somebody asks for it.
"""

from __future__ import annotations

import base64
import itertools
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from azure_catalog import REGION, SIZES

SUBSCRIPTION = "00000000-0000-4000-8000-000000000001"
GROUP = "makara-workers"
HOST_GROUP = "makara-manager"  # of the VM of `makara up`
MACHINES = "Microsoft.Compute/virtualMachines"
DISKS = "Microsoft.Compute/disks"
INTERFACES = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
ASYNCHRONOUS = ("AllocationFailed", "ZonalAllocationFailed", "OverconstrainedAllocationRequest")

Key = tuple[str, str]


# `learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules`, for a VM and its parts;
# of a Linux system: without underscores and periods, which some of them may have.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_LONGEST_MACHINE = 64
_LONGEST_PART = 80


class Refusal(Exception):
    """What the resource manager answers instead."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass
class Failing:
    """How creations end until this is taken away. Some codes are told at once, others after acceptance."""

    code: str
    message: str = "no room for it"
    status: int = 409

    @property
    def later(self) -> bool:
        return self.code in ASYNCHRONOUS


@dataclass
class Operation:
    """Something under way: `steps` more looks until it is done."""

    key: Key
    steps: int
    failing: Failing | None = None
    done: bool = False


@dataclass
class AzureAccount:
    """One resource group. Not safe to use without `lock`."""

    steps: int = 2  # of each operation
    failing: Failing | None = None
    fails_once: bool = False
    lists_late: bool = False
    tagged_disks: bool = True  # whether a disk is given the tags of its VM
    suffix: str = ""  # of the names that interfaces and addresses get
    reserved: int = 0  # times that the interface of a failed VM cannot be deleted
    resources: dict[Key, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict[str, str])  # by VM
    user_data: dict[str, bytes] = field(default_factory=dict)  # by VM
    unlisted: set[Key] = field(default_factory=set)
    operations: dict[str, Operation] = field(default_factory=dict)
    deletions: list[Key] = field(default_factory=list)
    quotas: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "cores": (0, 100),
            "lowPriorityCores": (0, 50),
            "standardDSv5Family": (0, 40),
        }
    )
    lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Any = field(default_factory=itertools.count)

    # ---- what is asked -------------------------------------------------------------------------------------

    def put_machine(
        self, name: str, body: dict[str, Any], *, only_new: bool
    ) -> tuple[int, dict[str, Any], str]:
        """Status, the VM, and the operation that goes on."""
        key = (MACHINES, name)
        if key in self.resources:
            if only_new:
                raise Refusal(412, "PreconditionFailed", f"{name} exists")
            raise Refusal(409, "PropertyChangeNotAllowed", f"{name} may not be changed")
        _refuse_names(name, body["properties"])
        self._refuse(body)
        failing = self.failing
        if self.fails_once:
            self.failing, self.fails_once = None, False
        if failing is not None and not failing.later:
            raise Refusal(failing.status, failing.code, failing.message)
        self._make(name, body)
        return 201, self.resources[key], self._begin(Operation(key, self.steps, failing))

    def get(self, key: Key) -> dict[str, Any]:
        for operation in self.operations.values():
            if operation.key == key:
                self._advance(operation)
        if key not in self.resources:
            raise Refusal(404, "ResourceNotFound", f"The Resource '{key[0]}/{key[1]}' was not found.")
        return self.resources[key]

    def delete(self, key: Key) -> str | None:
        """The operation that goes on; None if there is nothing."""
        self.deletions.append(key)
        if key not in self.resources:
            return None
        if key[0] == INTERFACES:
            if self._owner(key) in self.resources:
                raise Refusal(400, "NicInUse", f"{key[1]} is used by a virtual machine")
            if self.reserved > 0:
                self.reserved -= 1
                raise Refusal(400, "NicReservedForAnotherVm", f"{key[1]} is reserved for 180 seconds")
        elif key[0] == DISKS and self._owner(key) in self.resources:
            raise Refusal(409, "OperationNotAllowed", f"Disk {key[1]} is attached to a VM")
        self.resources[key]["properties"]["provisioningState"] = "Deleting"
        return self._begin(Operation(key, self.steps))

    def operation(self, name: str) -> dict[str, Any]:
        """The body of its status."""
        operation = self.operations[name]
        self._advance(operation)
        if not operation.done:
            return {"status": "InProgress"}
        failing = operation.failing
        if failing is None:
            return {"status": "Succeeded"}
        return {"status": "Failed", "error": {"code": failing.code, "message": failing.message}}

    def listed(self, kind: str) -> list[dict[str, Any]]:
        for operation in list(self.operations.values()):
            if operation.key[0] == kind:
                self._advance(operation)
        return [body for key, body in self.resources.items() if key[0] == kind and key not in self.unlisted]

    # ---- what Azure does by itself -------------------------------------------------------------------------

    def evict(self, name: str) -> None:
        """The VM is taken back; with the policy Delete everything that is its own goes with it."""
        profile = self.resources[MACHINES, name]["properties"]
        assert profile["evictionPolicy"] == "Delete", "the VM would be deallocated, and billed for its disk"
        self._remove((MACHINES, name))

    def settle(self) -> None:
        """Time passes: operations end, lists tell everything."""
        for operation in self.operations.values():
            while not operation.done:
                self._advance(operation)
        self.unlisted.clear()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _refuse(self, body: dict[str, Any]) -> None:
        properties = body["properties"]
        size = properties["hardwareProfile"]["vmSize"]
        if body["location"] != REGION or size not in SIZES:
            raise Refusal(400, "InvalidParameter", f"The requested VM size {size} is not available")
        cores = ("lowPriorityCores",) if properties["priority"] == "Spot" else (SIZES[size].family, "cores")
        for name in cores:
            used, limit = self.quotas[name]
            if used + SIZES[size].cpus > limit:
                message = (
                    f"Operation could not be completed as it results in exceeding approved {name} quota."
                    f" Current Limit: {limit}, Current Usage: {used}, Additional Required: {SIZES[size].cpus}"
                )
                raise Refusal(409, "OperationNotAllowed", message)
        if properties["priority"] != "Spot" and "evictionPolicy" in properties:
            raise Refusal(400, "EvictionPolicyCanBeSetOnlyOnAzureSpotVirtualMachines", "not a spot VM")
        if not set(body.get("zones", [])) <= SIZES[size].zones:
            raise Refusal(400, "InvalidParameter", "no such zone")
        assert properties["networkProfile"]["networkApiVersion"] == "2022-11-01"

    def _make(self, name: str, body: dict[str, Any]) -> None:
        properties = body["properties"]
        self.user_data[name] = base64.b64decode(properties["osProfile"].pop("customData"))
        (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
        disk = properties["storageProfile"]["osDisk"]
        more = {part: body[part] for part in ("identity", "zones") if part in body}
        machine = self._add(MACHINES, name, properties, body["tags"], **more)
        owner = machine["id"]
        inner = interface["properties"]["ipConfigurations"][0]["properties"]
        inner["privateIPAddress"] = "10.77.0.4"
        self._add(
            INTERFACES,
            interface["name"] + self.suffix,
            {**interface["properties"], "virtualMachine": {"id": owner}},
            interface.get("tags", {}),
        )
        self._add(DISKS, disk["name"], {}, body["tags"] if self.tagged_disks else {}, managedBy=owner)
        address = inner.get("publicIPAddressConfiguration")
        if address is not None:
            self._add(
                ADDRESSES,
                address["name"] + self.suffix,
                {**address["properties"], "ipAddress": "192.0.2.7"},
                address.get("tags", {}),
            )
        machine["properties"]["provisioningState"] = "Creating"

    def group_of(self, name: str) -> str:
        """Of a VM, or of what was made with it."""
        return next((group for vm, group in self.groups.items() if name.startswith(vm)), GROUP)

    def _add(
        self, kind: str, name: str, properties: dict[str, Any], tags: dict[str, str], **more: Any
    ) -> dict[str, Any]:
        group = self.group_of(name)
        path = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}/providers/{kind}/{name}"
        made = {
            **properties,
            "provisioningState": "Succeeded",
            "timeCreated": "2026-11-22T22:48:17.1234567+00:00",
        }
        body = {"id": path, "name": name, "type": kind, "location": REGION, "tags": tags, "properties": made}
        self.resources[kind, name] = {**body, **more}
        if self.lists_late:
            self.unlisted.add((kind, name))
        return self.resources[kind, name]

    def _begin(self, operation: Operation) -> str:
        name = f"operation-{next(self._numbers)}"
        self.operations[name] = operation
        return name

    def _advance(self, operation: Operation) -> None:
        if operation.done:
            return
        operation.steps -= 1
        if operation.steps > 0:
            return
        operation.done = True
        body = self.resources.get(operation.key)
        if body is None:
            return
        properties = body["properties"]
        if properties["provisioningState"] == "Deleting":
            self._remove(operation.key)
        elif operation.failing is not None:
            failed = f"ProvisioningState/failed/{operation.failing.code}"
            properties["provisioningState"] = "Failed"
            properties["instanceView"] = {
                "statuses": [{"code": failed, "message": operation.failing.message}]
            }
        elif properties["provisioningState"] == "Creating":
            properties["provisioningState"] = "Succeeded"
            properties["instanceView"] = {"statuses": [{"code": "PowerState/running"}]}

    def _remove(self, key: Key) -> None:
        body = self.resources.pop(key)
        self.unlisted.discard(key)
        if key[0] != MACHINES:
            return
        properties = body["properties"]
        (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
        inner = interface["properties"]["ipConfigurations"][0]["properties"]
        address = inner.get("publicIPAddressConfiguration")
        made = [
            ((INTERFACES, interface["name"] + self.suffix), interface["properties"]),
            ((DISKS, properties["storageProfile"]["osDisk"]["name"]), properties["storageProfile"]["osDisk"]),
        ]
        if address is not None:
            made.append(((ADDRESSES, address["name"] + self.suffix), address["properties"]))
        for part, options in made:
            if options.get("deleteOption") == "Delete":
                self.resources.pop(part, None)

    def _owner(self, key: Key) -> Key:
        body = self.resources[key]
        owner = body.get("managedBy") or body["properties"].get("virtualMachine", {}).get("id", "")
        return (MACHINES, owner.rpartition("/")[2])


def _refuse_names(machine: str, properties: dict[str, Any]) -> None:
    (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
    longest = {
        machine: _LONGEST_MACHINE,
        properties["osProfile"]["computerName"]: _LONGEST_MACHINE,
        interface["name"]: _LONGEST_PART,
        properties["storageProfile"]["osDisk"]["name"]: _LONGEST_PART,
    }
    inner = interface["properties"]["ipConfigurations"][0]["properties"]
    if "publicIPAddressConfiguration" in inner:
        longest[inner["publicIPAddressConfiguration"]["name"]] = _LONGEST_PART
    for name, most in longest.items():
        if len(name) > most or not _NAME.fullmatch(name):
            raise Refusal(400, "InvalidParameter", f"'{name}' is no name of at most {most} characters")
