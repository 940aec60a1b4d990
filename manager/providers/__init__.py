"""Providers create and release VMs on one cloud each. In: the core's commands. Out: VMs that boot into an
agent (`BootConfig`), and lists of what exists.

To add a cloud:

* here: a package that implements `Provider`, its section of clouds.yaml in `settings`, a branch that opens it
  in `opening.open_clouds`;
* `manager.places`: which of a journal's places that section no longer has;
* `manager.spec.resources`: `PROVIDERS`, `CLOUDS`, and `_cloud_of`, which tells the cloud of an instance type;
* `protocol.messages.boot`, where its VMs differ from those of AWS and Azure: how they hear of evictions
  (`NoticeSource`: read in `worker.agent.notices.watcher`), how they end (`VmEnding`: in `worker.agent.ending`
  and in `manager/boot/end_vm.py`, which runs without Makara), and how they sign in to a store
  (`StoreIdentity`: in `worker.agent.store_sign_in`);
* `manager.boot.payload`: the packages that a worker needs for a store of this cloud;
* `manager.hosting.payload`: the extra of pyproject.toml that has its client, if it is one;
* `checkpoint.stores`: an object store of its own;
* for `makara up` and `down`: `manager.hosting.host_settings`, and the places of `manager.cli.clouds.down`;
* a stand-in in tests/support/provider_stands.py: tests/providers/test_conformance.py holds every provider to
  what the manager relies on.

A provider decides nothing and remembers nothing essential: all that it creates is tagged with the names of
manager and VM, so that a manager that lost everything but its journal finds it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from ...protocol.messages import BootConfig
from ..spec.job_spec import Resources
from ..spec.placement import Attempt, Offer, Placement


class ResourceStatus(StrEnum):
    """The status of something that the provider created."""

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"  # may still be billed
    GONE = "gone"  # authoritative: it existed and has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A VM, or a part of one (a disk, an interface), with this manager's tag."""

    vm: str
    attempt: int
    id: str  # the provider's own
    status: ResourceStatus
    kind: Literal["vm", "interface", "disk", "address"] = "vm"
    created_at: float | None = None  # Unix seconds
    placement: Placement | None = None  # of a VM, if the cloud tells it
    private_address: str = ""  # in its network, if the cloud tells it
    public_address: str = ""
    taken_back: str = ""  # that the cloud itself ends the VM, and why; empty: it does not, or does not tell
    ran_s: float | None = None  # for how long a VM existed that is gone, if the cloud tells
    shows_power: bool = True  # False: from a list that reports a VM that has shut itself down as running


class ProviderError(Exception):
    """The call failed; the message says why in the provider's words. The base class itself means an unknown
    reason: the call may or may not have taken effect."""


class NoCapacity(ProviderError):
    """No capacity there now, and nothing was created; try another place, or later."""


class NotSold(NoCapacity):
    """The type is not offered there, or not for what is bid; that others give theirs up would not help."""


class QuotaExceeded(ProviderError):
    """The account may not have more of these, and nothing was created."""


class NotAllowed(ProviderError):
    """Refused permanently, and nothing was created: a right is missing, or the request can never succeed."""


class Unauthenticated(ProviderError):
    """Authentication failed, and this call did nothing: credentials have expired, do not exist yet, or are
    wrong. They may be renewed, so retry the call later."""


class Throttled(ProviderError):
    """Rate limit exceeded, and this call did nothing; retry it later."""


class Partial(ProviderError):
    """Some places of a cloud could not be asked; `found` holds the resources of the others."""

    def __init__(self, message: str, found: Sequence[Resource]) -> None:
        super().__init__(message)
        self.found = found


class Ended(ProviderError):
    """The VM of this attempt has ended already, and is never created again.

    For a cloud that forgets VMs at once (Azure), only the process that saw the VM can raise this."""


@runtime_checkable
class Bounded(Protocol):
    """A provider that knows how many VMs it can have at a time."""

    def capacity(self) -> int | None:
        """How many; None: any number."""
        ...


class Provider(Protocol):
    """Blocking calls, run off the event loop; safe to use from several threads. All raise `ProviderError`."""

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        """Create the VM of this attempt if it does not exist; returns its id. The VM boots with `boot`, which
        the provider completes with how its VMs hear of notices and how they end.

        Raises `NoCapacity`, `QuotaExceeded`, `NotAllowed` (nothing of it exists), `Ended`; `Throttled` and
        `Unauthenticated` (this call did nothing). After any other error the outcome is unknown, and the
        caller repeats the call until it is known.
        """
        ...

    def release(self, vm: str, attempts: int = 1) -> bool:
        """Delete everything of VM `vm`, whichever attempt created it.

        `attempts`: how many were made, as far as the caller knows; the provider may know of later ones.
        Returns True once all of it is gone, or never existed; the caller repeats the call until then.
        """
        ...

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        """The resources of one VM, asked for by name: newer than `list`, which may lag. `attempts`: as for
        `release`."""
        ...

    def list(self) -> Sequence[Resource]:
        """All resources with this manager's tag. It may or may not include those that are gone.

        Raises `Partial` if only some places cannot be asked."""
        ...

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        """Faults of a request for these VMs as (field of `resources`, message), before any is rented:
        credentials, unknown types, quota."""
        ...

    def offers(self, resources: Resources) -> Sequence[Offer]:
        """What can be requested, with prices, in the order in which to try."""
        ...

    def console(self, vm: str, attempts: int = 1) -> str:
        """The end of the VM's console output; empty if there is none.

        `attempts`: as for `release`.
        """
        ...

    def close(self) -> None:
        """Close connections and timers; VMs live on."""
        ...


def statuses(resources: Iterable[Resource]) -> dict[str, ResourceStatus]:
    """{VM: the status of its resource that is furthest from gone}."""
    found: dict[str, ResourceStatus] = {}
    for resource in resources:
        known = found.get(resource.vm, ResourceStatus.GONE)
        found[resource.vm] = min(known, resource.status, key=_LIFE.index)
    return found


def taken_back(resources: Iterable[Resource]) -> dict[str, str]:
    """{VM: why its cloud took it back} of the VMs of which a cloud tells that."""
    return {resource.vm: resource.taken_back for resource in resources if resource.taken_back}


def run_times(resources: Iterable[Resource]) -> dict[tuple[str, int], float]:
    """{(VM, attempt): for how long it existed} of the VMs of which a cloud tells that."""
    return {(one.vm, one.attempt): one.ran_s for one in resources if one.ran_s is not None}


def newest_attempts(resources: Iterable[Resource]) -> dict[str, int]:
    """{VM: the newest attempt of which a resource exists}."""
    found: dict[str, int] = {}
    for resource in resources:
        found[resource.vm] = max(resource.attempt, found.get(resource.vm, 1))
    return found


_LIFE = (ResourceStatus.RUNNING, ResourceStatus.PENDING, ResourceStatus.ENDING, ResourceStatus.GONE)

__all__ = [
    "Ended",
    "NoCapacity",
    "NotSold",
    "NotAllowed",
    "Partial",
    "Provider",
    "ProviderError",
    "QuotaExceeded",
    "Resource",
    "ResourceStatus",
    "Throttled",
    "Unauthenticated",
    "newest_attempts",
    "run_times",
    "statuses",
    "taken_back",
]
