"""Finds a manager's resources in its resource group, by shared lists or by name, and maps their states."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from azure.core.exceptions import AzureError

from .. import Resource, ResourceStatus
from ..shared_answers import SharedAnswer
from . import errors
from .account import KINDS, Kind, ResourceGroup, Thing
from .request import Names, names_of_thing

_RUNS = "PowerState/running"
_POWER_ENDS = ("PowerState/stopped", "PowerState/stopping", "PowerState/deallocat")

Owned = list[tuple[Names, Thing]]


class VmFinder:
    """Safe to use from several threads. All methods raise `ProviderError`."""

    def __init__(self, account: ResourceGroup, manager: str, clock: Callable[[], float]) -> None:
        self._account = account
        self._manager = manager
        self._lists: dict[Kind, SharedAnswer[Owned]] = {
            kind: SharedAnswer(lambda kind=kind: self._ask(kind), clock) for kind in KINDS
        }

    def get(self, kind: Kind, names: Names) -> Thing | None:
        """Get by name, whichever manager owns it; newer than any list."""
        try:
            return self._account.get(kind, name_of(kind, names))
        except AzureError as error:
            raise errors.of_request(error) from error

    def listed(self, kind: Kind, *, since: float) -> tuple[float, Owned]:
        """(when it was requested, this manager's things), from a list requested at `since` or later."""
        return self._lists[kind].get(since=since)

    def everything(self, *, since: float) -> Owned:
        return _as_their_vms([one for kind in self._lists for one in self.listed(kind, since=since)[1]])

    def forget(self) -> None:
        """Discard lists, because something was created or deleted."""
        for shared in self._lists.values():
            shared.forget()

    def owner(self, thing: Thing) -> Names | None:
        return names_of_thing(self._manager, thing.name, thing.tags)

    def _ask(self, kind: Kind) -> Owned:
        try:
            listed = [(self.owner(thing), thing) for thing in self._account.list(kind)]
        except AzureError as error:
            raise errors.of_request(error) from error
        return [(names, thing) for names, thing in listed if names is not None]


def name_of(kind: Kind, names: Names) -> str:
    by_kind = {"vm": names.machine, "interface": names.interface, "disk": names.disk}
    return by_kind.get(kind, names.address)


def resources_of(things: Sequence[tuple[Names, Thing]]) -> list[Resource]:
    """Convert to resources: parts have their VM's status; parts without a VM are leftovers, ending."""
    machines = {names: _status(thing) for names, thing in things if thing.kind == "vm"}
    return [
        Resource(
            vm=names.vm,
            attempt=names.number,
            id=thing.id,
            status=machines.get(names, ResourceStatus.ENDING),
            kind=thing.kind,
            created_at=_unix(thing.created),
            placement=thing.placement,
            private_address=thing.private_address,
            public_address=thing.public_address,
            # Nothing that runs on a VM deletes it: if it shuts itself down, it stays.
            taken_back="Azure is deleting it" if thing.kind == "vm" and thing.state == "Deleting" else "",
            shows_power=thing.kind != "vm" or bool(thing.codes),
        )
        for names, thing in things
    ]


def failure_of(machine: Thing) -> tuple[str, str]:
    """(code, message) of a failed creation, from `ProvisioningState/failed/AllocationFailed`."""
    for code, message in machine.codes:
        if code.startswith("ProvisioningState/failed/"):
            return code.rpartition("/")[2], message
    return "", f"Azure could not create {machine.name}"


def _as_their_vms(things: Owned) -> Owned:
    """Assign things without tags to the VM whose (perhaps shortened) name they have."""
    machines = {names.machine: names for names, thing in things if thing.kind == "vm"}
    return [(machines.get(names.machine, names), thing) for names, thing in things]


def _status(machine: Thing) -> ResourceStatus:
    """The status. A VM shut down from inside is billed until deleted; one may run though a change failed."""
    power = [code for code, _ in machine.codes if code.startswith("PowerState/")]
    if machine.state == "Deleting" or (machine.state == "Failed" and _RUNS not in power):
        return ResourceStatus.ENDING
    if machine.state == "Creating":
        return ResourceStatus.PENDING
    stopped = any(code.startswith(_POWER_ENDS) for code in power)
    return ResourceStatus.ENDING if stopped else ResourceStatus.RUNNING


def _unix(time: str | None) -> float | None:
    return None if time is None else datetime.datetime.fromisoformat(time).timestamp()
