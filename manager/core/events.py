"""Events: what the core is told, observations and results of commands.

They carry the time and any new ids, so that the core needs no clock and no randomness.
"""

from __future__ import annotations

from typing import Any, Literal

from ...protocol.messages import CheckpointRef, Report
from ..spec.frozen import Frozen
from ..spec.placement import Offer
from ..spec.start_source import StartSource
from .alternatives import Alternative
from .facts import RefusalKind, Resumption
from .pools.shares import Share


class Event(Frozen):
    now: float  # Unix seconds


class JobSubmitted(Event):
    job: str
    spec: dict[str, Any]  # makara.manager.spec.job_spec.JobSpec
    bundle_sha256: str
    start: StartSource | None = None
    owner: str | None = None


class StopRequested(Event):
    """A person wants the job to end."""


class Tick(Event):
    """Time has passed. `new_vms`: fresh unique VM ids that the core may use for requests. `share`: how many
    VMs the job may have where others want them, too."""

    new_vms: tuple[str, ...] = ()
    share: Share = Share()


class ReportReceived(Event):
    report: Report


class ConnectionClosed(Event):
    vm: str


class ManagerStarted(Event):
    """A manager process took over: every lease begins anew."""


class AttemptSucceeded(Event):
    """Answer to `RequestVm`: the provider has the VM, under an id of its own."""

    vm: str
    number: int
    id: str


class AttemptFailed(Event):
    """Answer to `RequestVm`: nothing of this attempt exists."""

    vm: str
    number: int
    kind: RefusalKind
    error: str


class RequestTroubled(Event):
    """A call for the newest attempt of this VM failed, and is repeated: its outcome is not known."""

    vm: str
    error: str


class OffersSeen(Event):
    """What the job's providers offer now, in the order in which it is to be tried.

    `unanswered`: providers that have not answered yet: their offers are not among these. `manager_url`: where
    a VM that is asked for now is to find its manager.
    """

    offers: tuple[Offer, ...]
    unanswered: tuple[str, ...] = ()
    manager_url: str = ""


class ReleaseRefused(Event):
    """A VM that is to be gone is not: its provider refuses that, or takes long; it is tried again."""

    vm: str
    error: str


class ConsoleRead(Event):
    """The end of what a VM wrote that did not join; empty if nobody could tell. The VM's own words."""

    vm: str
    text: str


class VmTerminated(Event):
    """The provider says that the VM is gone (authoritative). `taken_back`: its words, if it took it back;
    `ran_s`: for how long it existed, if the provider tells."""

    vm: str
    taken_back: str = ""
    ran_s: float | None = None


class VmListed(Event):
    """The provider shows an attempt for the VM: one that `lives`, or that has ended."""

    vm: str
    number: int
    lives: bool


class VmEndingSeen(Event):
    """The provider says that it is ending the VM, whose connection has closed; it is not gone yet.
    `taken_back`: as in `VmTerminated`."""

    vm: str
    taken_back: str = ""


class DrainRequested(Event):
    """A person wants this VM replaced."""

    vm: str


class Batch(Event):
    """Observations that came in one instant: taken in one after the other, then decided on once.

    A hundred VMs that the cloud takes at a time call for one plan, not for a hundred.
    """

    events: tuple[ReportReceived | ConnectionClosed | VmTerminated | VmEndingSeen | VmListed, ...]


class PlanComputed(Event):
    """Answer to `ComputePlan`. `plan` None: nothing feasible, and `reason` says why.

    `stays`: the plan that runs is worth as much, so that it goes on; `plan` is what was weighed beside it.
    `best_until`: until then, Unix seconds, that plan pays, or the one taken that is not the fastest, but
    keeps more of what workers hold. None: it was not chosen with an end in mind.
    """

    generation: int
    asked: frozenset[str]  # the workers that the question was about
    plan: dict[str, Any] | None
    workers: tuple[str, ...] = ()  # worker ids in rank order
    predicted_s: float | None = None
    current_s: float | None = None  # what the plan that runs is now predicted to take, if that was asked
    stays: bool = False
    best_until: float | None = None
    reason: str | None = None
    alternatives: tuple[Alternative, ...] = ()  # the one taken first


class GrowthComputed(Event):
    """Answer to the `ComputeGrowth` of this `key`. Seconds of a step; None: there is no plan.

    `num_more`: the fewest VMs more that pay, or as many as were asked about if none do. `alternatives`: plans
    without and with them, the one taken first.
    """

    key: str
    num_more: int
    step_s: float | None  # without them
    grown_s: float | None  # with them
    pays: bool
    alternatives: tuple[Alternative, ...] = ()

    @property
    def gain(self) -> float:
        """The part of a step that they save; 1 if there is no plan without them."""
        if self.grown_s is None:
            return 0.0
        return 1.0 - self.grown_s / self.step_s if self.step_s is not None else 1.0


class HeadOpened(Event):
    """Answer to `OpenHead`: `checkpoints` are those published, newest first."""

    generation: int
    checkpoints: tuple[CheckpointRef, ...]


class HeadDiffers(Event):
    """Answer to `OpenHead`: the head is not as the journal knows it, and was left as it is.

    `difference`: `missing`: there is none, or none that can be read; `lacks`: it has not the generation or
    the checkpoints that it should; `ahead`: somebody else has opened it. `head_generation` and `checkpoints`,
    newest first, are what it has.
    """

    generation: int
    difference: Literal["missing", "lacks", "ahead"]
    reason: str
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()


class HeadSeen(Event):
    """What the head, open at `generation`, lists now.

    `leaving`: how many have left it whose parts are not deleted yet.
    """

    generation: int
    checkpoints: tuple[CheckpointRef, ...]
    leaving: int = 0


class CommandStuck(Event):
    """A command could not be carried out for longer than anybody's patience; `error` says why, in the words
    of the store or the system. `generation`: that of an `OpenHead`."""

    command: str
    error: str
    generation: int | None = None


class ResumeRequested(Event):
    """A person's answer to a job that waits for one."""

    how: Resumption


class ContinueRequested(Event):
    """A person has a job go on that had ended, on so many VMs, which may cost so much; None: as it was."""

    min_nodes: int
    max_nodes: int
    max_hourly_cost: float | None = None
    budget: float | None = None


class CheckpointCopied(Event):
    """Answer to `CopyCheckpoint`: `checkpoint` of the job is what was `source` of the other. `skipped`: why
    that is not the newest; empty if it is."""

    checkpoint: CheckpointRef
    source: CheckpointRef | None
    skipped: str = ""


class CheckpointDeleted(Event):
    checkpoint: CheckpointRef


class WeightsExported(Event):
    uri: str
    sha256: str  # makara.checkpoint.export: hash over names, dtypes, shapes and bytes in name order
    step: int
    note: str = ""  # why they are those of an older step than the last


class JobCommandFailed(Event):
    """A command failed by a fault of ours; `command` is its own name (`compute_plan`, ...), `key` its key."""

    command: str
    error: str
    key: str = ""
