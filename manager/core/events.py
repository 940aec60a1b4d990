"""Events: what the core is told, observations and results of commands.

They carry the time and any new ids, so that the core needs no clock and no randomness.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...protocol.messages import CheckpointRef, Report
from ..spec.frozen import Frozen
from ..spec.placement import Offer
from ..spec.start_source import StartSource
from .facts import RefusalKind, Resumption


class JobSubmitted(Frozen):
    event: Literal["job_submitted"] = "job_submitted"
    now: float
    job: str
    spec: dict[str, Any]  # makara.manager.spec.job_spec.JobSpec
    bundle_sha256: str
    start: StartSource | None = None


class StopRequested(Frozen):
    event: Literal["stop_requested"] = "stop_requested"
    now: float


class Tick(Frozen):
    """Time has passed. `new_vms`: fresh unique VM ids that the core may use for requests."""

    event: Literal["tick"] = "tick"
    now: float
    new_vms: tuple[str, ...] = ()


class ReportReceived(Frozen):
    event: Literal["report_received"] = "report_received"
    now: float
    report: Report


class ConnectionClosed(Frozen):
    event: Literal["connection_closed"] = "connection_closed"
    now: float
    vm: str


class ManagerStarted(Frozen):
    """A manager process took over: every lease begins anew."""

    event: Literal["manager_started"] = "manager_started"
    now: float


class AttemptSucceeded(Frozen):
    """Answer to `RequestVm`: the provider has the VM, under an id of its own."""

    event: Literal["attempt_succeeded"] = "attempt_succeeded"
    now: float
    vm: str
    number: int
    id: str


class AttemptFailed(Frozen):
    """Answer to `RequestVm`: nothing of this attempt exists."""

    event: Literal["attempt_failed"] = "attempt_failed"
    now: float
    vm: str
    number: int
    kind: RefusalKind
    error: str


class OffersSeen(Frozen):
    """What the job's providers offer now, in the order in which it is to be tried.

    `unanswered`: providers that have not answered yet: their offers are not among these. `manager_url`: where
    a VM that is asked for now is to find its manager.
    """

    event: Literal["offers_seen"] = "offers_seen"
    now: float
    offers: tuple[Offer, ...]
    unanswered: tuple[str, ...] = ()
    manager_url: str = ""


class ReleaseRefused(Frozen):
    """A VM that is to be gone is not: its provider refuses that, or takes long; it is tried again."""

    event: Literal["release_refused"] = "release_refused"
    now: float
    vm: str
    error: str


class ConsoleRead(Frozen):
    """The end of what a VM wrote that did not join; empty if nobody could tell. The VM's own words."""

    event: Literal["console_read"] = "console_read"
    now: float
    vm: str
    text: str


class VmTerminated(Frozen):
    """The provider says that the VM is gone (authoritative)."""

    event: Literal["vm_terminated"] = "vm_terminated"
    now: float
    vm: str


class VmEndingSeen(Frozen):
    """The provider says that it is ending the VM, whose connection has closed; it is not gone yet."""

    event: Literal["vm_ending"] = "vm_ending"
    now: float
    vm: str


class DrainRequested(Frozen):
    """A person wants this VM replaced."""

    event: Literal["drain_requested"] = "drain_requested"
    now: float
    vm: str


class Batch(Frozen):
    """Observations that came in one instant: taken in one after the other, then decided on once.

    A hundred VMs that the cloud takes at a time call for one plan, not for a hundred.
    """

    event: Literal["together"] = "together"
    now: float
    events: tuple[ReportReceived | ConnectionClosed | VmTerminated | VmEndingSeen, ...]


class PlanComputed(Frozen):
    """Answer to `ComputePlan`. `plan` None: nothing feasible, and `reason` says why."""

    event: Literal["plan_computed"] = "plan_computed"
    now: float
    generation: int
    asked: frozenset[str]  # the workers that the question was about
    plan: dict[str, Any] | None
    workers: tuple[str, ...] = ()  # worker ids in rank order
    predicted_s: float | None = None
    current_s: float | None = None  # what the plan that runs is now predicted to take, if that was asked
    reason: str | None = None


class GrowthComputed(Frozen):
    """Answer to the `ComputeGrowth` of this `key`. Seconds of a step; None: there is no plan.

    `num_more`: the fewest VMs more that save enough, or as many as were asked about if none do.
    """

    event: Literal["growth_computed"] = "growth_computed"
    now: float
    key: str
    num_more: int
    step_s: float | None  # without them
    grown_s: float | None  # with them

    @property
    def gain(self) -> float:
        """The part of a step that they save; 1 if there is no plan without them."""
        if self.grown_s is None:
            return 0.0
        return 1.0 - self.grown_s / self.step_s if self.step_s is not None else 1.0


class HeadOpened(Frozen):
    """Answer to `OpenHead`: `checkpoints` are those published, newest first."""

    event: Literal["head_opened"] = "head_opened"
    now: float
    generation: int
    checkpoints: tuple[CheckpointRef, ...]


class HeadDiffers(Frozen):
    """Answer to `OpenHead`: the head is not as the journal knows it, and was left as it is.

    `difference`: `missing`: there is none, or none that can be read; `lacks`: it has not the generation or
    the checkpoints that it should; `ahead`: somebody else has opened it. `head_generation` and `checkpoints`,
    newest first, are what it has.
    """

    event: Literal["head_differs"] = "head_differs"
    now: float
    generation: int
    difference: Literal["missing", "lacks", "ahead"]
    reason: str
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()


class HeadSeen(Frozen):
    """What the head, open at `generation`, lists now."""

    event: Literal["head_seen"] = "head_seen"
    now: float
    generation: int
    checkpoints: tuple[CheckpointRef, ...]


class CommandStuck(Frozen):
    """A command could not be carried out for longer than anybody's patience; `error` says why, in the words
    of the store or the system. `generation`: that of an `OpenHead`."""

    event: Literal["command_stuck"] = "command_stuck"
    now: float
    command: str
    error: str
    generation: int | None = None


class ResumeRequested(Frozen):
    """A person's answer to a job that waits for one."""

    event: Literal["resume_requested"] = "resume_requested"
    now: float
    how: Resumption


class ContinueRequested(Frozen):
    """A person has a job go on that had ended, on so many VMs, which may cost so much; None: as it was."""

    event: Literal["continue_requested"] = "continue_requested"
    now: float
    min_nodes: int
    max_nodes: int
    max_hourly_cost: float | None = None
    budget: float | None = None


class CheckpointCopied(Frozen):
    """Answer to `CopyCheckpoint`: `checkpoint` of the job is what was `source` of the other."""

    event: Literal["checkpoint_copied"] = "checkpoint_copied"
    now: float
    checkpoint: CheckpointRef
    source: CheckpointRef | None


class CheckpointDeleted(Frozen):
    event: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    now: float
    checkpoint: CheckpointRef


class WeightsExported(Frozen):
    event: Literal["weights_exported"] = "weights_exported"
    now: float
    uri: str
    sha256: str  # makara.checkpoint.export: hash over names, dtypes, shapes and bytes in name order
    step: int
    note: str = ""  # why they are those of an older step than the last


class JobCommandFailed(Frozen):
    """A command failed by a fault of ours; `command` is its own name (`compute_plan`, ...), `key` its key."""

    event: Literal["job_command_failed"] = "job_command_failed"
    now: float
    command: str
    error: str
    key: str = ""


Event = Annotated[
    JobSubmitted
    | StopRequested
    | Tick
    | ReportReceived
    | ConnectionClosed
    | ManagerStarted
    | AttemptSucceeded
    | AttemptFailed
    | OffersSeen
    | ConsoleRead
    | ReleaseRefused
    | VmTerminated
    | VmEndingSeen
    | DrainRequested
    | Batch
    | PlanComputed
    | GrowthComputed
    | HeadOpened
    | HeadDiffers
    | HeadSeen
    | CommandStuck
    | ResumeRequested
    | ContinueRequested
    | CheckpointCopied
    | CheckpointDeleted
    | WeightsExported
    | JobCommandFailed,
    Field(discriminator="event"),
]
