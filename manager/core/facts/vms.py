"""Facts about VMs: asked for, attempted, joined, to hand over, ended, gone, and what they have cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from ...spec.placement import Attempt, Price
from ..alternatives import Alternative
from .base import BaseFact


class EndReason(StrEnum):
    """Why a VM left a job."""

    PREEMPTED = "preempted"  # it had joined, and the cloud says that it is gone, or going
    LEASE_EXPIRED = "lease_expired"  # silent for so long that its agent has ended itself
    PEERS_LOST_IT = "peers_lost_it"  # in older journals alone: connection closed, and peers lost it too
    RELEASED = "released"  # no longer wanted
    REQUEST_FAILED = "request_failed"  # the cloud refused or never delivered
    UNUSED = "unused"  # no plan gave it work for long
    LEFT = "left"  # it ended itself and said so
    WORKERS_DIED = "workers_died"  # its trainers died, again and again, without a new step
    UNFIT = "unfit"  # its workers cannot meet the recipe
    CORRUPT_STATE = "corrupt_state"  # its state was another than that of other hosts of the same section
    CUT_OFF = "cut_off"  # one of its workers and another cannot reach each other, again and again


class VmRequested(BaseFact):
    fact: Literal["vm_requested"] = "vm_requested"
    vm: str


class GrowthWeighed(BaseFact):
    """Whether more VMs of a cloud pay: `num_more` of them do. 0: none, of as many as were thought of."""

    fact: Literal["growth_weighed"] = "growth_weighed"
    num_more: int
    alternatives: tuple[Alternative, ...]  # the one taken first


class AttemptMade(BaseFact):
    """The provider is asked for the VM, as `attempt` says; it may cost `price` from now on.

    `manager_url`: where the VM is to find its manager; empty in earlier journals.
    """

    fact: Literal["attempt_made"] = "attempt_made"
    vm: str
    attempt: Attempt
    price: Price
    manager_url: str = ""


class RefusalKind(StrEnum):
    """Why a provider gave no VM, so that nothing of the attempt exists."""

    NO_CAPACITY = "no_capacity"  # none to be had there now
    QUOTA = "quota"  # the account may not have more of these
    NOT_SOLD = "not_sold"  # the type is not offered in this zone, or not for what is bid
    NOT_ALLOWED = "not_allowed"  # refused until somebody changes a right
    CREDENTIALS = "credentials"  # the manager could not sign in; they may be renewed
    NO_ANSWER = "no_answer"  # whether there is one was never known, for so long that the VM was given up
    ENDED = "ended"  # there was one, and its cloud ended it before it joined


class AttemptRefused(BaseFact):
    """Nothing came of an attempt, and nothing of it exists."""

    fact: Literal["attempt_refused"] = "attempt_refused"
    vm: str
    number: int
    kind: RefusalKind
    message: str


class VmCreated(BaseFact):
    """The provider has the VM, under an id of its own."""

    fact: Literal["vm_created"] = "vm_created"
    vm: str
    number: int  # of the attempt
    id: str


class VmJoined(BaseFact):
    fact: Literal["vm_joined"] = "vm_joined"
    vm: str
    address: str
    devices: tuple[dict[str, Any], ...]
    step: int | None = None  # the job's newest then (earlier versions: None)


class VmNoticed(BaseFact):
    fact: Literal["vm_noticed"] = "vm_noticed"
    vm: str
    deadline: float  # Unix seconds
    action: str = ""  # the cloud's own word for what it will do


class VmNoticeWithdrawn(BaseFact):
    """The cloud says no more that it will take the VM."""

    fact: Literal["vm_notice_withdrawn"] = "vm_notice_withdrawn"
    vm: str


class VmRiskChanged(BaseFact):
    """The cloud says that it may take the VM sooner than others, or says so no more."""

    fact: Literal["vm_risk_changed"] = "vm_risk_changed"
    vm: str
    at_risk: bool


class VmDrained(BaseFact):
    """A person wants the VM to hand over, and another in its place."""

    fact: Literal["vm_drained"] = "vm_drained"
    vm: str


class VmYielded(BaseFact):
    """The VM is to hand over and go, as `why` says; `stays`: no longer, since no plan does without it."""

    fact: Literal["vm_yielded"] = "vm_yielded"
    vm: str
    why: str = ""
    stays: bool = False


class VmEnded(BaseFact):
    fact: Literal["vm_ended"] = "vm_ended"
    vm: str
    reason: EndReason
    detail: str = ""
    gone: bool = True  # the provider says so; else it counts until `VmGone` (earlier versions: never)
    # The job's newest step, if it had joined and was lost ...
    lost_at: int | None = None  # ... and no cloud says that it took it
    taken_at: int | None = None  # ... since its cloud took it, before a step was made with it
    ran_s: float | None = None  # if it is gone: for how long it existed, by its provider's word


class VmGone(BaseFact):
    """The provider says that nothing of a VM that had ended exists any more. `ran_s`: for how long it
    existed, if the provider tells."""

    fact: Literal["vm_gone"] = "vm_gone"
    vm: str
    ran_s: float | None = None


class VmNotReleased(BaseFact):
    """The first time that a VM that had ended could not be released: `hourly_at_most`, in USD, is paid for it
    until it is gone."""

    fact: Literal["vm_not_released"] = "vm_not_released"
    vm: str
    message: str
    hourly_at_most: float


class CostNoted(BaseFact):
    """What VMs have cost so far is settled, with `unseen_s` seconds more for each: no clock that is set later
    makes it less. `until`: what they cost until then, if the clock was later before it was set back."""

    fact: Literal["cost_noted"] = "cost_noted"
    unseen_s: float = 0.0
    until: float | None = None


class ManagerAway(BaseFact):
    """There may have been no manager until now. `must_end`: {VM: when it has ended itself at the latest,
    unless it is seen again}. A VM that no provider had shown may have been there unseen, for `unwatched_s` at
    most."""

    fact: Literal["manager_away"] = "manager_away"
    must_end: dict[str, float]
    unwatched_s: float


class VmSeen(BaseFact):
    """The provider lists the VM, or it reports. `lives`: it is not listed as one that has ended."""

    fact: Literal["vm_seen"] = "vm_seen"
    vm: str
    lives: bool


class IsolationChanged(BaseFact):
    """This manager seems to be cut off from its VMs, or hears of them again."""

    fact: Literal["isolation_changed"] = "isolation_changed"
    isolated: bool
    num_vms: int  # that have joined
