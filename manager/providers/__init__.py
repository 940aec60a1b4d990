"""Providers: where VMs come from. In go the core's commands to create and release; out come VMs that boot
into an agent (`BootConfig`), and word of what there is.

A provider holds no decision and no memory that matters: whatever it creates carries its manager's and its
VM's name as tags, so that a manager that lost everything but its journal finds it again. All of them pass
tests/providers/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from ...protocol.messages import BootConfig
from ..spec.job_spec import Resources
from ..spec.placement import Attempt, Offer, Placement


class ResourceStatus(StrEnum):
    """What the provider says of something that it created."""

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"  # it may be billed still
    GONE = "gone"  # authoritative: it was here and has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A VM, or something that belongs to one, with this manager's tag."""

    vm: str
    attempt: int
    id: str  # the provider's own
    status: ResourceStatus
    kind: Literal["vm", "interface", "disk", "address"] = "vm"
    created_at: float | None = None  # Unix seconds
    placement: Placement | None = None  # of a VM, where a cloud tells it
    private_address: str = ""  # by which it is reached in its network, where a cloud tells it
    public_address: str = ""
    shows_power: bool = True  # False: told by a list that calls a VM running which has shut itself down


class ProviderError(Exception):
    """The provider could not do it; the message says why in its words. By itself: for an unknown reason, and
    what was asked may or may not be done."""


class NoCapacity(ProviderError):
    """None to be had there now, and nothing was created; another place, or a later time, may have one."""


class QuotaExceeded(ProviderError):
    """The account may not have more of these, and nothing was created."""


class NotAllowed(ProviderError):
    """Refused for good, and nothing was created: a right is missing, or the request can never succeed."""


class Unauthenticated(ProviderError):
    """The manager could not sign in, and this call did nothing: credentials have expired, are not there yet,
    or are wrong. They may be renewed: the same call is worth making again later."""


class Throttled(ProviderError):
    """Asked too often: nothing was done, and the same call is to be made again later."""


class Partial(ProviderError):
    """Some places of a cloud could not be asked; `found` is what the others have."""

    def __init__(self, message: str, found: Sequence[Resource]) -> None:
        super().__init__(message)
        self.found = found


class Ended(ProviderError):
    """What this attempt created has ended already: it is never created again.

    A cloud that forgets VMs at once (Azure) can tell so only in the process that saw the VM."""


class Provider(Protocol):
    """Blocking calls, run off the event loop; safe to use from several threads. All raise `ProviderError`."""

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        """Have the VM of this attempt exist, or do nothing if it does; its id. The VM boots with `boot`, in
        which this provider says how its VMs hear of notices and how they end.

        Raises `NoCapacity`, `QuotaExceeded`, `NotAllowed` (nothing of it exists), `Ended`; `Throttled` and
        `Unauthenticated` (this call did nothing). After any other error the outcome is unknown, and the same
        call is made again until it is known.
        """
        ...

    def release(self, vm: str, attempts: int = 1) -> bool:
        """Have nothing of VM `vm` exist, whichever attempt created it.

        `attempts`: how many were made, as far as the caller knows; the provider may know of later ones.
        True once the provider says that all of it is gone, or never was; until then it is called again.
        """
        ...

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        """What there is of one VM, asked for by name: newer than `list`, which may lag behind. `attempts`: as
        for `release`."""
        ...

    def list(self) -> Sequence[Resource]:
        """Whatever carries this manager's tag, of all VMs. What is gone may be in it for a while, or not.

        Raises `Partial` if some places alone cannot be asked."""
        ...

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        """What is wrong with the wish for these VMs, as (field of `resources`, message), before any is
        rented: credentials, unknown types, quota."""
        ...

    def offers(self, resources: Resources) -> Sequence[Offer]:
        """What can be asked for, in the order in which it is to be tried, with prices."""
        ...

    def console(self, vm: str, attempts: int = 1) -> str:
        """The end of what the VM wrote while it booted; empty if there is none.

        `attempts`: as for `release`.
        """
        ...

    def close(self) -> None:
        """Forget connections and timers; VMs live on."""
        ...


def statuses(resources: Iterable[Resource]) -> dict[str, ResourceStatus]:
    """By VM, the status of whichever of its resources is furthest from gone."""
    found: dict[str, ResourceStatus] = {}
    for resource in resources:
        known = found.get(resource.vm, ResourceStatus.GONE)
        found[resource.vm] = min(known, resource.status, key=_LIFE.index)
    return found


def newest_attempts(resources: Iterable[Resource]) -> dict[str, int]:
    """By VM, the number of its newest attempt that anything is of."""
    found: dict[str, int] = {}
    for resource in resources:
        found[resource.vm] = max(resource.attempt, found.get(resource.vm, 1))
    return found


_LIFE = (ResourceStatus.RUNNING, ResourceStatus.PENDING, ResourceStatus.ENDING, ResourceStatus.GONE)

FaultKind = Literal["kill", "notice", "stop", "continue"]


class FaultInjector(Protocol):
    """What the demo and the tests do to VMs; only the local provider offers it."""

    def inject(self, vm: str, kind: FaultKind, deadline_s: float = 0.0) -> None:
        """`kill`: the whole VM at once. `notice`: word of a kill `deadline_s` from now, and then the kill.
        `stop`/`continue`: its trainers hang and wake (SIGSTOP, SIGCONT). Raises `ProviderError`."""
        ...


__all__ = [
    "Ended",
    "FaultInjector",
    "FaultKind",
    "NoCapacity",
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
    "statuses",
]
