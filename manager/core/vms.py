"""What is known of each VM that was ever requested, and counts over several VMs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..spec.placement import Attempt, Price
from .facts import EndReason


class VmStatus(StrEnum):
    REQUESTED = "requested"
    JOINED = "joined"
    NOTICED = "noticed"  # to hand over its state: the cloud takes it at `deadline`, or a person drains it
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
    joined_step: int | None = None  # the job's newest step then; None: not known
    address: str = ""
    devices: tuple[dict[str, Any], ...] = ()
    deadline: float | None = None
    action: str = ""  # what the cloud does then, in its own word
    drained_at: float | None = None  # when a person asked for its drain, or it was given up
    yielded: str = ""  # why it was given up; empty if it was not
    at_risk: bool = False  # the cloud may take it sooner than others
    ended_at: float | None = None
    reason: EndReason | None = None
    detail: str = ""
    number: int = 0  # how many were requested before it
    attempt: Attempt | None = None  # the newest; None in journals of earlier versions
    attempted_at: float | None = None  # when `attempt` was made; None: nothing of it exists
    price: Price | None = None  # of `attempt`
    noted: Spent = Spent()  # what the newest attempt had cost for certain by `noted_at`
    noted_at: float | None = None  # None: no cost is noted
    existed: bool = False  # the provider has said that it has `attempt`, or had it
    unwatched_s: float = 0.0  # for how long it may have been there while there was no manager to see it
    must_end_by: float | None = (
        None  # it ended itself by then, for want of a manager; None: it was seen since
    )
    not_released: str = ""  # why the VM still exists, though it has ended; empty: no reason is known
    id: str = ""  # the provider's own, once it has one
    created_at: float | None = None  # by the provider's word
    manager_url: str = ""  # where it is to find its manager

    @property
    def live(self) -> bool:
        return self.status is not VmStatus.ENDED

    @property
    def joined(self) -> bool:
        return self.status in (VmStatus.JOINED, VmStatus.NOTICED)

    @property
    def awaited_since(self) -> float:
        """Since when the VM is expected to join: its creation, as far as that is known."""
        return self.created_at or self.attempted_at or self.requested_at

    @property
    def num_attempts(self) -> int:
        """How many attempts were made to create the VM, at least."""
        return self.attempt.number if self.attempt is not None else 1

    def is_as_new_as(self, other: Vm) -> bool:
        """Whether this VM was requested together with the other one or later."""
        return self.requested_at == other.requested_at or self.number >= other.number


@dataclass(frozen=True, slots=True)
class Enough:
    """How many VMs the plan of this shape uses, when others were released because it had no work for them."""

    shape: str
    num_vms: int
    since: float


@dataclass(frozen=True, slots=True)
class Losses:
    """How often VMs that had joined were lost; those lost within a minute are one loss."""

    count: int = 0
    at: float = 0.0  # when the last began
    num_vms: int = 0  # in all


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of a VM that is gone."""

    vm: str
    number: int  # the VM's
    spent: Spent

    @property
    def live(self) -> bool:
        return False
