"""Facts: what the core decides. They are journalled; the state of a job is their fold and nothing else."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer

from ...protocol.messages import CheckpointRef, Formed, Recipe
from ..spec.frozen import Frozen
from ..spec.placement import Attempt, Price
from ..spec.start_source import StartSource


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
    CUT_OFF = "cut_off"  # one of its workers and another cannot reach each other, again and again


class _Fact(Frozen):
    at: float  # Unix seconds, from the event that caused it


class Submitted(_Fact):
    fact: Literal["submitted"] = "submitted"
    job: str
    spec: dict[str, Any]
    bundle_sha256: str
    start: StartSource | None = None


class StartCopied(_Fact):
    """The checkpoint that the job starts from is its own now, as `checkpoint`; it was `source` of the other.

    `source` None: it was copied before, and nobody was told.
    """

    fact: Literal["start_copied"] = "start_copied"
    checkpoint: CheckpointRef
    source: CheckpointRef | None


class VmRequested(_Fact):
    fact: Literal["vm_requested"] = "vm_requested"
    vm: str


class AttemptMade(_Fact):
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
    NOT_ALLOWED = "not_allowed"  # refused until somebody changes a right
    CREDENTIALS = "credentials"  # the manager could not sign in; they may be renewed
    ENDED = "ended"  # there was one, and it has ended


class AttemptRefused(_Fact):
    """Nothing came of an attempt, and nothing of it exists."""

    fact: Literal["attempt_refused"] = "attempt_refused"
    vm: str
    number: int
    kind: RefusalKind
    message: str


class VmCreated(_Fact):
    """The provider has the VM, under an id of its own."""

    fact: Literal["vm_created"] = "vm_created"
    vm: str
    number: int  # of the attempt
    id: str


class VmJoined(_Fact):
    fact: Literal["vm_joined"] = "vm_joined"
    vm: str
    address: str
    devices: tuple[dict[str, Any], ...]


class VmNoticed(_Fact):
    fact: Literal["vm_noticed"] = "vm_noticed"
    vm: str
    deadline: float  # Unix seconds
    action: str = ""  # the cloud's own word for what it will do


class VmNoticeWithdrawn(_Fact):
    """The cloud says no more that it will take the VM."""

    fact: Literal["vm_notice_withdrawn"] = "vm_notice_withdrawn"
    vm: str


class VmRiskChanged(_Fact):
    """The cloud says that it may take the VM sooner than others, or says so no more."""

    fact: Literal["vm_risk_changed"] = "vm_risk_changed"
    vm: str
    at_risk: bool


class VmDrained(_Fact):
    """A person wants the VM to hand over, and another in its place."""

    fact: Literal["vm_drained"] = "vm_drained"
    vm: str


class VmEnded(_Fact):
    fact: Literal["vm_ended"] = "vm_ended"
    vm: str
    reason: EndReason
    detail: str = ""
    gone: bool = True  # the provider says so; else it counts until `VmGone` (earlier versions: never)


class VmGone(_Fact):
    """The provider says that nothing of a VM that had ended exists any more."""

    fact: Literal["vm_gone"] = "vm_gone"
    vm: str


class VmNotReleased(_Fact):
    """The first time that a VM that had ended could not be released: `hourly_at_most`, in USD, is paid for it
    until it is gone."""

    fact: Literal["vm_not_released"] = "vm_not_released"
    vm: str
    message: str
    hourly_at_most: float


class CostNoted(_Fact):
    """What VMs have cost so far is settled, with `unseen_s` seconds more for each: no clock that is set later
    makes it less."""

    fact: Literal["cost_noted"] = "cost_noted"
    unseen_s: float = 0.0


class IsolationChanged(_Fact):
    """This manager seems to be cut off from its VMs, or hears of them again."""

    fact: Literal["isolation_changed"] = "isolation_changed"
    isolated: bool
    num_vms: int  # that have joined


class WorkerFailed(_Fact):
    """A trainer died while its VM lives on; its next incarnation is another worker as far as plans go."""

    fact: Literal["worker_failed"] = "worker_failed"
    worker: str
    incarnation: int
    kind: str
    message: str
    traceback: str | None = None
    step: int = 0  # newest step that was committed, as far as was reported
    own_steps: int | None = None  # committed by this incarnation in its last generation; None: not recorded
    counted: bool = True  # toward failing the job


class RecipeFixed(_Fact):
    fact: Literal["recipe_fixed"] = "recipe_fixed"
    recipe: Recipe
    calibration: dict[str, Any]
    measurements: dict[str, Any] | None = None  # all that the calibration is of
    stored: bool = False  # an earlier job had left them in the store
    note: str = ""


class Obsolete(_Fact):
    """Something that earlier versions decided and this one does not: it changes nothing; see `old_facts`."""

    fact: Literal["obsolete"] = "obsolete"
    name: str
    written: dict[str, Any]  # all of it, as it was

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return self.written


class BitsFixed(_Fact):
    """`numerics: exact`: the bits that every worker's kernels must give, as `workers` showed them.

    `note`: in what they differ from those of the job that this one starts from.
    """

    fact: Literal["bits_fixed"] = "bits_fixed"
    bits_hash: str
    kernels_hash: str | None = None
    note: str = ""
    workers: tuple[str, ...]


class Recalibrated(_Fact):
    """The workers' own timings differ from the calibration for good: its times are multiplied, by section."""

    fact: Literal["recalibrated"] = "recalibrated"
    scales: tuple[float, ...]


class WorkerPaced(_Fact):
    """A worker is slower than its peers for good, so many times; 1.0: it is not, or is to be tried again."""

    fact: Literal["worker_paced"] = "worker_paced"
    worker: str
    incarnation: int
    slowdown: float


class GenerationKind(StrEnum):
    """What a generation is for. The numbers of each kind are its own."""

    TRAIN = "train"
    PROFILE = "profile"  # its members measure the model and their links; it has neither plan nor head


class GenerationPlanned(_Fact):
    """Generation `number` is to be formed by `members` (plan workers in rank order, then donors)."""

    fact: Literal["generation_planned"] = "generation_planned"
    kind: GenerationKind = GenerationKind.TRAIN
    number: int
    cause: str
    plan: dict[str, Any]
    members: tuple[tuple[str, int], ...]  # (worker, incarnation)
    predicted_s: float | None
    detected_at: float  # when the cause was seen
    decided_s: float  # planning time
    saves_only: bool = False  # it takes no step, and holds after a checkpoint


class GenerationPrepared(_Fact):
    """Every member is prepared; the head is being swapped, and older generations may not publish any more."""

    fact: Literal["generation_prepared"] = "generation_prepared"
    number: int
    endpoint: str


class GenerationOpened(_Fact):
    """The head is swapped, where there is one: members may switch."""

    fact: Literal["generation_opened"] = "generation_opened"
    kind: GenerationKind = GenerationKind.TRAIN
    number: int
    endpoint: str
    checkpoints: tuple[CheckpointRef, ...]


class GenerationFormed(_Fact):
    fact: Literal["generation_formed"] = "generation_formed"
    number: int
    formed: Formed
    lost_steps: int  # committed before, done again now


class GenerationStalled(_Fact):
    """No member has made progress for longer than the bound: the stacks of all are asked for."""

    fact: Literal["generation_stalled"] = "generation_stalled"
    generation: int
    number: int  # of stalls of this job
    step: int
    silent_s: float
    bound_s: float
    standing: dict[str, str]  # worker -> what it is at
    suspects: tuple[str, ...]  # whose own work stands still
    doublings: int = 0  # of the bound: stalls before this one, at the same step


class StacksTaken(_Fact):
    """Where all threads of a worker stood."""

    fact: Literal["stacks_taken"] = "stacks_taken"
    number: int
    worker: str
    text: str


class GenerationClosed(_Fact):
    fact: Literal["generation_closed"] = "generation_closed"
    kind: GenerationKind = GenerationKind.TRAIN
    number: int
    reason: str


class PlanImpossible(_Fact):
    fact: Literal["plan_impossible"] = "plan_impossible"
    generation: int
    reason: str


class CheckpointPublished(_Fact):
    fact: Literal["checkpoint_published"] = "checkpoint_published"
    checkpoint: CheckpointRef


class CheckpointRetired(_Fact):
    """Chosen for deletion by the retention rule."""

    fact: Literal["checkpoint_retired"] = "checkpoint_retired"
    checkpoint: CheckpointRef


class HoldChanged(_Fact):
    """Whether workers stop after a checkpoint, because too few VMs would remain."""

    fact: Literal["hold_changed"] = "hold_changed"
    hold: bool
    reason: str


class TrainingFinished(_Fact):
    """The last step is committed and published."""

    fact: Literal["training_finished"] = "training_finished"
    checkpoint: CheckpointRef


class Resumption(StrEnum):
    """What a person may have a waiting job do."""

    AGAIN = "again"  # try once more: what was wrong was put right
    FROM_HEAD = "from_head"  # go on from what the head lists, whatever the journal knows
    RESTART = "restart"  # begin at step 0, without any checkpoint


class PersonNeeded(_Fact):
    """The job waits until a person says how it is to go on; `offers` are the answers that it can follow.

    `head_generation` and `checkpoints` are what the head has, where that is the question. `console`: the end
    of what a VM wrote that did not join; whoever has a say on that VM may have written it.
    """

    fact: Literal["person_needed"] = "person_needed"
    reason: str
    offers: tuple[Resumption, ...]
    vms_until: float  # Unix seconds: then its VMs are saved from and released, if no generation steps
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()
    console: str = ""


class JobResumed(_Fact):
    """A person's answer. With `from_head`, `checkpoints` are those that exist from now on."""

    fact: Literal["job_resumed"] = "job_resumed"
    how: Resumption
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()


class JobContinued(_Fact):
    """A person has a job go on that was stopped or failed, on so many VMs, which may cost so much.

    Failures are counted anew."""

    fact: Literal["job_continued"] = "job_continued"
    min_nodes: int
    max_nodes: int
    max_hourly_cost: float | None = None  # None: as it was
    budget: float | None = None  # of the job's whole life; None: as it was


class JobEnded(_Fact):
    fact: Literal["job_ended"] = "job_ended"
    status: Literal["finished", "stopped", "failed"]
    reason: str = ""
    traceback: str | None = None
    export_uri: str | None = None
    export_sha256: str | None = None


class StopOrdered(_Fact):
    """Workers are to save what they hold; then the job ends, as a person wanted or with `failure`."""

    fact: Literal["stop_ordered"] = "stop_ordered"
    failure: JobEnded | None = None


Fact = Annotated[
    Submitted
    | StartCopied
    | VmRequested
    | AttemptMade
    | AttemptRefused
    | VmCreated
    | VmJoined
    | VmNoticed
    | VmNoticeWithdrawn
    | VmRiskChanged
    | VmDrained
    | VmEnded
    | VmGone
    | VmNotReleased
    | CostNoted
    | IsolationChanged
    | WorkerFailed
    | RecipeFixed
    | Obsolete
    | BitsFixed
    | Recalibrated
    | WorkerPaced
    | GenerationPlanned
    | GenerationPrepared
    | GenerationOpened
    | GenerationFormed
    | GenerationStalled
    | StacksTaken
    | GenerationClosed
    | PlanImpossible
    | CheckpointPublished
    | CheckpointRetired
    | HoldChanged
    | StopOrdered
    | TrainingFinished
    | PersonNeeded
    | JobResumed
    | JobContinued
    | JobEnded,
    Field(discriminator="fact"),
]
