"""`AzureProvider`: implements `Provider` with Azure.

A VM is one resource, named by its attempt and its manager; Azure creates and deletes interface and disk with
it. When a creation fails, all three may remain: they are deleted by name before the failure is reported.
Azure keeps no record of a deleted VM, so `Ended` is raised only for VMs that this process saw end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError

from ....protocol.messages import BootConfig, NoticeSource, StoreIdentity, VmEnding
from ...spec.job_spec import Resources
from ...spec.placement import Attempt, Offer
from .. import Ended, NoCapacity, NotAllowed, ProviderError, Resource, Unauthenticated
from . import errors
from .account import Kind, ResourceGroup, Thing
from .catalog import Catalog
from .console import read_console
from .finding import VmFinder, failure_of, name_of, resources_of
from .request import VM_TAG, Names, key_of_nobody, names_of, vm_request
from .settings import AzureSettings

log = logging.getLogger("makara.manager")

_MADE_WITH_IT: tuple[Kind, ...] = ("interface", "disk", "address")
_TAGGED: tuple[Kind, ...] = ("interface", "address")  # tagged in their VM's request
_EXISTS = 412  # the HTTP status for a name that is taken
_LIST_S = 5.0  # jobs share lists up to this age
_END_AGAIN_S = 30.0


class AzureProvider:
    """VMs in one resource group; `manager` is in the tags and names of all that it creates.

    `create` polls a VM every `poll_s` seconds (or as Azure says), and leaves the outcome unknown after
    `patience_s`; a repeated call continues polling. Lists are shared for `list_s` seconds.
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
        list_s: float = _LIST_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._render = render
        self._account = ResourceGroup(settings, credential, poll_s=poll_s)
        self._group = VmFinder(self._account, manager, clock)
        self._catalog = Catalog(settings, self._account.client, clock)
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._list_s = list_s
        self._clock = clock
        self._closed = threading.Event()
        self._newest: dict[str, int] = {}  # {VM: its newest attempt known to this process}
        self._made: set[Names] = set()  # attempts whose VM this process has seen
        self._ended: dict[str, float] = {}  # {name: when Azure was last told to delete the VM}
        self._told: set[Names] = set()  # attempts whose deletion was requested at least once
        self._public_key = settings.ssh_public_key or key_of_nobody()

    # ---- the provider's contract ---------------------------------------------------------------------------

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        names = names_of(self._manager, attempt)
        user_data = self._render(attempt, self._boot(boot))
        body = vm_request(self._settings, self._manager, attempt, user_data, self._public_key)
        self._know(attempt.vm, attempt.number)
        try:
            return self._create(names, body)
        finally:
            self._group.forget()

    def release(self, vm: str, attempts: int = 1) -> bool:
        """Releases share lists; resources that no list has are asked for by name."""
        return all([self._release(names) for names in self._attempts(vm, attempts)])

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        *older, newest = self._attempts(vm, attempts)
        found = [(names, thing) for names, thing in self._everything() if names in older] if older else []
        for kind in (*_MADE_WITH_IT, "vm"):
            part = self._group.get(kind, newest)
            if part is not None and self._group.owner(part) is not None:
                found.append((newest, part))
        return resources_of(found)

    def list(self) -> Sequence[Resource]:
        """At most some seconds old. Unlike `look`, it does not show which VMs have shut themselves down."""
        resources = resources_of(
            [(names, self._as_it_is(names, thing)) for names, thing in self._everything()]
        )
        for resource in resources:
            self._know(resource.vm, resource.attempt)
        return resources

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        return self._catalog.check(resources)

    def offers(self, resources: Resources) -> Sequence[Offer]:
        return self._catalog.offers(resources)

    def console(self, vm: str, attempts: int = 1) -> str:
        """The newest attempt's serial console, from Azure's boot diagnostics."""
        for names in reversed(self._attempts(vm, attempts)):
            if self._group.get("vm", names) is not None:
                return self._console(names)
        return ""

    def close(self) -> None:
        self._closed.set()
        self._account.close()

    def _boot(self, boot: BootConfig) -> BootConfig:
        """`boot` for Azure. A VM deletes itself if it has an identity that may; else it shuts down, and is
        billed until the manager deletes it. Trainers, which run users' code, have another identity."""
        settings, ending, store = self._settings, VmEnding(kind="power_off"), StoreIdentity()
        if settings.identity_id is not None:
            url = settings.resource_manager.rstrip("/")
            ending = VmEnding(kind="azure", management_url=url, identity_id=settings.identity_id)
        if settings.store_identity_id is not None:
            store = StoreIdentity(kind="azure", identity_id=settings.store_identity_id)
        told = {"notices": NoticeSource(kind="azure"), "ending": ending, "store_identity": store}
        return boot.model_copy(update=told)

    # ---- a creation and its failure ------------------------------------------------------------------------

    def _create(self, names: Names, body: dict[str, Any]) -> str:
        leftovers = [kind for kind in _MADE_WITH_IT if self._group.get(kind, names) is not None]
        # If there is no VM, its parts are of a failed creation.
        if self._group.get("vm", names) is not None:
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

    def _follow(self, names: Names) -> str:
        """Poll a VM requested before: returns its id once Azure has created it; raises why it has not."""
        for _ in range(max(1, int(self._patience_s / self._poll_s))):
            machine = self._get_made(names)
            if machine is None:
                raise ProviderError(f"Azure VM {names.machine} was there, and is no more")
            if self._group.owner(machine) is None:
                raise NotAllowed(f"a VM named {names.machine} is there already, and is not this manager's")
            if machine.state == "Failed":
                self._remove_failed(names)
                raise errors.of_failure(*failure_of(machine))
            if machine.state == "Deleting":
                self._made.add(names)
                raise Ended(f"Azure VM {names.machine} is being deleted")
            if machine.state != "Creating":
                self._made.add(names)
                return machine.id
            self._closed.wait(self._poll_s)
        raise ProviderError(f"Azure VM {names.machine} is still being created")

    def _get_made(self, names: Names) -> Thing | None:
        """Get the VM. Lack of the right to read it does not mean that it does not exist."""
        try:
            return self._group.get("vm", names)
        except (NotAllowed, Unauthenticated) as error:
            raise ProviderError(f"it is not known whether {names.machine} was created: {error}") from error

    def _after_trouble(self, names: Names, error: AzureError) -> str:
        """Handle an accepted creation that failed or could not be polled."""
        if errors.status_of(error) not in (200, 201) or not errors.code_of(error):
            raise ProviderError(f"it is not known whether {names.machine} was created: {error}") from error
        self._remove_failed(names)
        raise errors.of_failure(errors.code_of(error), errors.message_of(error)) from error

    def _remove_failed(self, names: Names) -> None:
        """Delete everything of a failed creation."""
        for _ in range(max(1, int(self._patience_s / self._poll_s))):
            try:
                if self._remove(names, since=self._clock()):
                    return
            except (NotAllowed, Unauthenticated) as error:
                raise ProviderError(f"what {names.machine} left cannot be deleted: {error}") from error
            self._closed.wait(self._poll_s)
        raise ProviderError(f"what a failed creation of {names.machine} left cannot be deleted yet")

    # ---- the end of a VM -----------------------------------------------------------------------------------

    def _release(self, names: Names) -> bool:
        """Begin to delete everything of one attempt; True once nothing is left.

        A VM that this process created is told to end before any list is waited for.
        """
        if names in self._made and names not in self._told:
            self._tell_end(names)
        asked_at, listed = self._group.listed("vm", since=self._clock() - self._list_s)
        machine = next((thing for owner, thing in listed if owner == names), None)
        if machine is None:
            return self._remove(names, since=asked_at)
        self._end(names, machine)
        return False

    def _remove(self, names: Names, *, since: float) -> bool:
        """Likewise, by name. Deleting a VM deletes its parts; without a VM each part, listed at `since` or
        later, is deleted by its own name.
        """
        machine = self._group.get("vm", names)
        if machine is not None and machine.tags.get(VM_TAG, names.vm) != names.vm:
            return True  # found by the shortened name of an untagged disk, whose VM exists
        if machine is not None:
            self._end(names, machine)
            return False
        return self._remove_parts(names, since)

    def _end(self, names: Names, machine: Thing) -> None:
        """Request a VM's deletion, which takes a minute or more, and is repeated only now and then."""
        now = self._clock()
        told_at = self._ended.get(names.machine)
        if machine.state == "Deleting" or (told_at is not None and 0.0 <= now - told_at < _END_AGAIN_S):
            return
        self._tell_end(names)

    def _tell_end(self, names: Names) -> None:
        self._delete("vm", names.machine)
        now = self._clock()
        self._ended = {name: at for name, at in self._ended.items() if now - at < _END_AGAIN_S}
        self._ended[names.machine] = now
        self._told.add(names)

    def _remove_parts(self, names: Names, since: float) -> bool:
        """Delete parts by name, since lists may lag, and by tag, since Azure does not promise to give an
        interface or address the requested name."""
        left: dict[str, Kind] = {
            thing.name: kind
            for kind in _TAGGED
            for owner, thing in self._group.listed(kind, since=since)[1]
            if owner == names
        }
        named: list[Kind] = [kind for kind in _MADE_WITH_IT if self._group.get(kind, names) is not None]
        left.update((name_of(kind, names), kind) for kind in named)
        for name, kind in left.items():
            self._delete(kind, name)
        if left:
            self._group.forget()
        return not left

    def _delete(self, kind: Kind, name: str) -> None:
        try:
            self._account.delete(kind, name)
        except AzureError as error:
            if errors.code_of(error) not in errors.STILL_USED:
                raise errors.of_request(error) from error
            log.info("%s cannot be deleted yet: %s", name, error)

    # ---- what there is -------------------------------------------------------------------------------------

    def _attempts(self, vm: str, attempts: int) -> list[Names]:
        """Attempts that may have left something, the newest last. Older ones are known only from lists: an
        attempt is made only when nothing of the one before exists by name."""
        if vm not in self._newest:
            self.list()
        most = max(attempts, self._newest.get(vm, 1))
        newest = Names(manager=self._manager, vm=vm, number=most)
        if most == 1:
            return [newest]
        listed = {names for names, _ in self._everything() if names.vm == vm and names.number < most}
        return [*sorted(listed, key=lambda names: names.number), newest]

    def _everything(self) -> list[tuple[Names, Thing]]:
        return self._group.everything(since=self._clock() - self._list_s)

    def _as_it_is(self, names: Names, thing: Thing) -> Thing:
        """The VM's real state, by name: a VM whose last change failed may still run."""
        if thing.kind != "vm" or thing.state != "Failed":
            return thing
        return self._group.get("vm", names) or thing

    def _know(self, vm: str, number: int) -> None:
        self._newest[vm] = max(number, self._newest.get(vm, 0))

    def _console(self, names: Names) -> str:
        try:
            return read_console(self._account.client, self._settings, names.machine)
        except AzureError as error:
            raise errors.of_request(error) from error
