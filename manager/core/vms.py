"""What is known of one VM that was ever asked for, and of what became of several."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..spec.placement import Attempt, Price
from .facts import EndReason, RefusalKind


class VmStatus(StrEnum):
    REQUESTED = "requested"
    JOINED = "joined"
    NOTICED = "noticed"  # it is to hand over: the cloud takes it at `deadline`, or a person drains it
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Spent:
    """USD for VMs: as expected, and at most."""

    spot: float = 0.0
    on_demand: float = 0.0
    at_most: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        spot, on_demand = self.spot + other.spot, self.on_demand + other.on_demand
        return Spent(spot, on_demand, self.at_most + other.at_most)


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM that was ever requested."""

    vm: str
    requested_at: float
    status: VmStatus = VmStatus.REQUESTED
    joined_at: float | None = None
    address: str = ""
    devices: tuple[dict[str, Any], ...] = ()
    deadline: float | None = None
    action: str = ""  # what the cloud does then, in its own word
    drained_at: float | None = None  # when a person asked for its drain
    at_risk: bool = False  # the cloud may take it sooner than others
    ended_at: float | None = None
    reason: EndReason | None = None
    detail: str = ""
    number: int = 0  # how many were requested before it
    attempt: Attempt | None = None  # the newest; None in journals of earlier versions
    attempted_at: float | None = None  # when that was made; None: nothing of it exists
    price: Price | None = None  # of that
    noted: Spent = Spent()  # what that had cost for certain ...
    noted_at: float | None = None  # ... by then; None: nothing is
    not_released: str = ""  # why it is there still, though it has ended
    id: str = ""  # the provider's own, once it has it
    created_at: float | None = None  # when the provider said so
    manager_url: str = ""  # where it is to find its manager

    @property
    def live(self) -> bool:
        return self.status is not VmStatus.ENDED

    @property
    def joined(self) -> bool:
        return self.status in (VmStatus.JOINED, VmStatus.NOTICED)

    @property
    def awaited_since(self) -> float:
        """From when it is waited for to join: its creation, as far as that is known."""
        return self.created_at or self.attempted_at or self.requested_at

    @property
    def num_attempts(self) -> int:
        """How many were made to have it, at least."""
        return self.attempt.number if self.attempt is not None else 1

    def is_as_new_as(self, other: Vm) -> bool:
        """Whether it was asked for together with the other or later."""
        return self.requested_at == other.requested_at or self.number >= other.number


@dataclass(frozen=True, slots=True)
class PlaceRefusal:
    """What came of the last attempts in one place."""

    kind: RefusalKind
    at: float
    message: str
    count: int = 1  # in a row


@dataclass(frozen=True, slots=True)
class NotJoined:
    """VMs of one origin that did not join, in a row; those that were asked for together are one."""

    count: int
    at: float  # when the last of them ended


@dataclass(frozen=True, slots=True)
class Enough:
    """The VMs that a plan uses, beside which others were released that it had no use for."""

    shape: str
    num_vms: int
    since: float


@dataclass(frozen=True, slots=True)
class Losses:
    """How often VMs that had joined were lost; those lost within a minute are one loss."""

    count: int = 0
    at: float = 0.0  # when the last began


@dataclass(frozen=True, slots=True)
class Bill:
    """What a VM has cost that is gone."""

    vm: str
    number: int  # the VM's
    spent: Spent

    @property
    def live(self) -> bool:
        return False
