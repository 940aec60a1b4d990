"""The provider's contract on Azure.

A VM is one resource, named by its attempt and its manager; Azure makes interface and disk with it and deletes
them with it. When a creation fails, all three may stay: they are deleted by name before the failure is told.
Azure remembers nothing of a VM that is gone, so that `Ended` is raised for what this process saw end, alone.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Sequence

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ....protocol.messages import BootConfig, NoticeSource, StoreIdentity, VmEnding
from ...spec.job_spec import Resources
from ...spec.placement import Attempt, Offer
from .. import Ended, NoCapacity, NotAllowed, ProviderError, Resource, ResourceStatus
from . import errors
from .account import KINDS, Account, Kind, Thing
from .catalog import Catalog
from .console import read_console
from .request import VM_TAG, Names, names_of, names_of_thing, vm_request
from .settings import AzureSettings

log = logging.getLogger("makara.manager")

_MADE_WITH_IT: tuple[Kind, ...] = ("interface", "disk", "address")
_TAGGED: tuple[Kind, ...] = ("interface", "address")  # in the same request as their VM
_EXISTS = 412  # the HTTP status for a name that is not free
_RUNS = "PowerState/running"
_POWER_ENDS = ("PowerState/stopped", "PowerState/stopping", "PowerState/deallocat")


class AzureProvider:
    """VMs in one resource group; `manager` is in the tags and the names of all that it makes.

    `create` asks every `poll_s` seconds (or as Azure says) what has become of a VM, and leaves its outcome
    unknown after `patience_s`; called again, it goes on asking.
    """

    def __init__(
        self,
        settings: AzureSettings,
        manager: str,
        render: Callable[[Attempt, BootConfig], bytes],
        *,
        credential: TokenCredential,
        poll_s: float = 5.0,
        patience_s: float = 600.0,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._render = render
        self._account = Account(settings, credential, poll_s=poll_s)
        self._catalog = Catalog(settings, self._account.client)
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._closed = threading.Event()
        self._newest: dict[str, int] = {}  # attempts that this process knows of, by VM
        self._made: set[Names] = set()  # whose VM it has seen
        self._public_key = settings.ssh_public_key or _key_of_nobody()

    # ---- the provider's contract ---------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        names = names_of(self._manager, attempt)
        user_data = self._render(attempt, self._boot(boot))
        body = vm_request(self._settings, self._manager, attempt, user_data, self._public_key)
        self._know(attempt.vm, attempt.number)
        leftovers = [kind for kind in _MADE_WITH_IT if self._get(kind, names) is not None]
        machine = self._get("vm", names)  # asked for last: without it, what is there is a failed creation's
        if machine is not None:
            return self._follow(names)
        if names in self._made:
            raise Ended(f"Azure VM {names.machine} is gone")
        if leftovers:
            self._remove_failed(names)
            raise NoCapacity(f"an earlier creation of {names.machine} has failed; what it left is deleted")
        try:
            poller = self._account.create(names.machine, body)
        except AzureError as error:
            if errors.status_of(error) == _EXISTS:
                return self._follow(names)
            raise errors.of_request(error) from error
        try:
            poller.wait(self._patience_s)
            if not poller.done():
                raise ProviderError(f"Azure VM {names.machine} is still being created")
            poller.result()
        except AzureError as error:
            return self._after_trouble(names, error)
        return self._follow(names)

    def release(self, vm: str, attempts: int = 1) -> bool:
        return all([self._remove(names) for names in self._names(vm, attempts)])

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        found: list[tuple[Names, Thing]] = []
        for names in self._names(vm, attempts):
            parts = [self._get(kind, names) for kind in (*_MADE_WITH_IT, "vm")]
            found += [(names, part) for part in parts if part is not None and self._owner(part) is not None]
        return _resources(found)

    def list(self) -> Sequence[Resource]:
        found = [(self._owner(thing), thing) for kind in self._kinds() for thing in self._all(kind)]
        things = [(names, thing) for names, thing in found if names is not None]
        resources = _resources(_as_their_vms(things))
        for resource in resources:
            self._know(resource.vm, resource.attempt)
        return resources

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return self._catalog.check(resources)

    def offers(self, resources: Resources) -> Sequence[Offer]:
        return self._catalog.offers(resources)

    def console(self, vm: str, attempts: int = 1) -> str:
        """What Azure's boot diagnostics have of the newest attempt's serial console."""
        for names in reversed(self._names(vm, attempts)):
            if self._get("vm", names) is not None:
                return self._console(names)
        return ""

    def close(self) -> None:
        self._closed.set()
        self._account.close()

    def _boot(self, boot: BootConfig) -> BootConfig:
        """A VM deletes itself where it has an identity that may; else it is shut down, and billed until the
        manager deletes it. Its trainers use the store as another one, for they run users' code."""
        settings, ending, store = self._settings, VmEnding(kind="power_off"), StoreIdentity()
        if settings.identity_id is not None:
            url = settings.resource_manager.rstrip("/")
            ending = VmEnding(kind="azure", management_url=url, identity_id=settings.identity_id)
        if settings.store_identity_id is not None:
            store = StoreIdentity(kind="azure", identity_id=settings.store_identity_id)
        told = {"notices": NoticeSource(kind="azure"), "ending": ending, "store_identity": store}
        return boot.model_copy(update=told)

    # ---- a creation and its failure ------------------------------------------------------------------------

    def _follow(self, names: Names) -> str:
        """The id of a VM that was asked for before, once Azure has made it; or why it has not."""
        for _ in range(max(1, int(self._patience_s / self._poll_s))):
            machine = self._get("vm", names)
            if machine is None:
                raise ProviderError(f"Azure VM {names.machine} was there, and is no more")
            if self._owner(machine) is None:
                raise NotAllowed(f"a VM named {names.machine} is there already, and is not this manager's")
            if machine.state == "Failed":
                self._remove_failed(names)
                raise errors.of_failure(*_failure(machine))
            if machine.state == "Deleting":
                self._made.add(names)
                raise Ended(f"Azure VM {names.machine} is being deleted")
            if machine.state != "Creating":
                self._made.add(names)
                return machine.id
            self._closed.wait(self._poll_s)
        raise ProviderError(f"Azure VM {names.machine} is still being created")

    def _after_trouble(self, names: Names, error: AzureError) -> str:
        """A creation that was accepted has failed, or what has become of it could not be asked."""
        if errors.status_of(error) not in (200, 201) or not errors.code_of(error):
            raise ProviderError(f"it is not known whether {names.machine} was created: {error}") from error
        self._remove_failed(names)
        raise errors.of_failure(errors.code_of(error), errors.message_of(error)) from error

    def _remove_failed(self, names: Names) -> None:
        """Have nothing of a failed creation exist."""
        for _ in range(max(1, int(self._patience_s / self._poll_s))):
            if self._remove(names):
                return
            self._closed.wait(self._poll_s)
        raise ProviderError(f"what a failed creation of {names.machine} left cannot be deleted yet")

    def _remove(self, names: Names) -> bool:
        """Begin to delete what there is of one attempt; True once there is nothing.

        A VM takes with it what was made with it; without a VM each is deleted by its own name.
        """
        machine = self._get("vm", names)
        if machine is not None and machine.tags.get(VM_TAG, names.vm) != names.vm:
            return True  # asked for by the shortened name of a disk without tags: what it belongs to is there
        if machine is not None:
            if machine.state != "Deleting":
                self._delete("vm", names.machine)
            return False
        return self._remove_parts(names)

    def _remove_parts(self, names: Names) -> bool:
        """By their names, which no list need have yet; and by their tags, for Azure does not promise to give
        an interface or address the name that was asked for."""
        listed = [thing for kind in _TAGGED for thing in self._all(kind) if self._owner(thing) == names]
        left: dict[str, Kind] = {thing.name: thing.kind for thing in listed}
        left |= {_name(kind, names): kind for kind in _MADE_WITH_IT if self._get(kind, names) is not None}
        for name, kind in left.items():
            self._delete(kind, name)
        return not left

    def _delete(self, kind: Kind, name: str) -> None:
        try:
            self._account.delete(kind, name)
        except AzureError as error:
            if errors.code_of(error) not in errors.STILL_USED:
                raise errors.of_request(error) from error
            log.info("%s cannot be deleted yet: %s", name, error)

    # ---- what there is -------------------------------------------------------------------------------------

    def _get(self, kind: Kind, names: Names) -> Thing | None:
        if kind not in self._kinds():
            return None
        try:
            return self._account.get(kind, _name(kind, names))
        except AzureError as error:
            raise errors.of_request(error) from error

    def _all(self, kind: Kind) -> list[Thing]:
        if kind not in self._kinds():
            return []
        try:
            return list(self._account.list(kind))
        except AzureError as error:
            raise errors.of_request(error) from error

    def _names(self, vm: str, attempts: int) -> list[Names]:
        """Of each attempt that may have left something, the oldest first."""
        if vm not in self._newest:
            self.list()
        most = max(attempts, self._newest.get(vm, 1))
        return [Names(manager=self._manager, vm=vm, number=number + 1) for number in range(most)]

    def _know(self, vm: str, number: int) -> None:
        self._newest[vm] = max(number, self._newest.get(vm, 0))

    def _console(self, names: Names) -> str:
        try:
            return read_console(self._account.client, self._settings, names.machine)
        except AzureError as error:
            raise errors.of_request(error) from error

    def _kinds(self) -> tuple[Kind, ...]:
        return KINDS if self._settings.public_address else KINDS[:-1]

    def _owner(self, thing: Thing) -> Names | None:
        return names_of_thing(self._manager, thing.name, thing.tags)


def _as_their_vms(things: Sequence[tuple[Names, Thing]]) -> list[tuple[Names, Thing]]:
    """What has no tags belongs to the VM whose name, which may be shortened, it has."""
    machines = {names.machine: names for names, thing in things if thing.kind == "vm"}
    return [(machines.get(names.machine, names), thing) for names, thing in things]


def _resources(things: Sequence[tuple[Names, Thing]]) -> list[Resource]:
    """What belongs to a VM is as its VM is; what has none is left over and on its way out."""
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
        )
        for names, thing in things
    ]


def _status(machine: Thing) -> ResourceStatus:
    """What was shut down from inside is billed until it is deleted. One may run though a change failed."""
    power = [code for code, _ in machine.codes if code.startswith("PowerState/")]
    if machine.state == "Deleting" or (machine.state == "Failed" and _RUNS not in power):
        return ResourceStatus.ENDING
    if machine.state == "Creating":
        return ResourceStatus.PENDING
    stopped = any(code.startswith(_POWER_ENDS) for code in power)
    return ResourceStatus.ENDING if stopped else ResourceStatus.RUNNING


def _failure(machine: Thing) -> tuple[str, str]:
    """Code and message of a creation that failed, from `ProvisioningState/failed/AllocationFailed`."""
    for code, message in machine.codes:
        if code.startswith("ProvisioningState/failed/"):
            return code.rpartition("/")[2], message
    return "", f"Azure could not create {machine.name}"


def _name(kind: Kind, names: Names) -> str:
    by_kind = {"vm": names.machine, "interface": names.interface, "disk": names.disk}
    return by_kind.get(kind, names.address)


def _unix(time: str | None) -> float | None:
    return None if time is None else datetime.datetime.fromisoformat(time).timestamp()


def _key_of_nobody() -> str:
    """Azure wants a public key for each Linux VM: one whose private half is forgotten here lets nobody in."""
    public = Ed25519PrivateKey.generate().public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
