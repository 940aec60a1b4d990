"""The wire between a manager and an agent, and between an agent and its trainers.

Both directions are *level-triggered*: an `Orders` message is all that a VM should now be doing, and a
`Report` is all that it now is. Either may be lost, repeated or sent again after a reconnection without
harm; only the newest counts. Everything is JSON; nothing here imports torch. Manager and agents need not be
of one version: `frames` reads what comes from the other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from .bounds import (
    MOST_DEATHS,
    MOST_DEVICES,
    MOST_ENTRIES,
    MOST_METRICS,
    Count,
    Finite,
    JsonObject,
    Name,
    Seconds,
    Text,
)
from .instruction_sets import InstructionSet
from .unknown_values import or_else

_INDICES = frozenset(str(index) for index in range(MOST_DEVICES))

# Raised when an older side would misread what a newer one says. New fields and frames need no new number:
# they have defaults, and are passed over where they are not known.
PROTOCOL = 1
# Raised when trainers of two versions could not form a generation, or train in it, together: what they say to
# each other, and in which order, is no matter of the manager's.
TRAINER_PROTOCOL = 2  # `saves_only`; copied weights begin alike


DeviceKind = Annotated[Literal["cpu", "cuda", "other"], or_else("other")]
"""Other: of a kind that this version does not know, and cannot plan for."""


# Of one connection, by both sides: the plan that runs and the one that is prepared.
PLANS_KEPT = 2

# Of one worker slot, for each agent that its VM has: a reboot starts another.
INCARNATIONS = 10_000


class Message(BaseModel):
    """Strict and immutable: an unknown key or a wrong type is an error, never ignored."""

    # A loss may be no number; as JSON it must come back as what it was.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class CheckpointRef(Message):
    """A published checkpoint: the state after commit `step`, written by `generation`."""

    step: Count
    generation: Count


class StoreConfig(Message):
    """Where a job's checkpoints live. Credentials come from the environment (AWS_ACCESS_KEY_ID,
    AZURE_STORAGE_KEY, ...)."""

    uri: str  # file:///abs/path, s3://bucket/prefix or az://container/prefix
    endpoint: str | None = None  # of an S3-compatible service (None is AWS) or of an Azure account
    region: str | None = None


class Recipe(Message):
    """What is fixed at a job's first plan and never changes; a trainer that cannot meet it does not
    join."""

    microbatch_size: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    cuts: list[Count] = Field(max_length=MOST_ENTRIES)  # graph positions before which sections 1..K-1 begin
    graph_hash: Name
    threads: int = Field(ge=1)
    device_kind: DeviceKind
    torch_version: Name
    bundle_sha256: Name
    bits_hash: Name | None = None  # `numerics: exact`: see `fitness`; None: not known, or not compared
    kernels_hash: Name | None = None  # likewise

    @property
    def num_sections(self) -> int:
        return len(self.cuts) + 1

    @property
    def global_batch_size(self) -> int:
        return self.microbatch_size * self.num_micro_batches

    def without_bits(self) -> Recipe:
        return self.model_copy(update={"bits_hash": None, "kernels_hash": None})


class JobSettings(Message):
    """The part of a job's specification that a trainer needs."""

    job: str
    entrypoint: str  # module:function, resolved in the unpacked bundle
    seed: int
    steps: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)
    microbatch_size: int | None = None  # None: chosen by calibration
    num_sections: int | None = None  # K; None: chosen from the graph
    pipeline_parallel_degree: int | None = None  # P, for which K must be enough; None: left to the planner
    numerics: Literal["exact", "fast"]
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    threads: int = Field(default=1, ge=1)
    instruction_set: InstructionSet = "native"
    device_memory_bytes: int | None = None  # that a worker may use; None: all that its device has
    workers_per_node: int = Field(default=1, ge=1)
    most_workers: int = Field(default=1, ge=1)  # that the job may get; m leaves a micro-batch for each
    store: StoreConfig
    checkpoint_interval_steps: int | None = None
    checkpoint_interval_s: float | None = None
    bundle_sha256: str
    setup: str | None = None  # a shell command run once on each VM before its trainers start
    envs: dict[str, str] = Field(default_factory=dict)


class Member(Message):
    """A worker that takes part in forming a generation; ranks follow the order of the list.

    The first `plan.num_workers` members are the plan's workers; the rest are donors, which hand over the
    sections they hold and leave.
    """

    worker: str
    address: str  # the private address its process groups bind to


class GenerationOrder(Message):
    """Generation `number`: get ready for it (`prepare`), then switch to it (`go`)."""

    number: int = Field(ge=1)
    # Those of kind `profile` measure the model, have no plan, and are numbered by themselves.
    kind: Literal["train", "profile"] = "train"
    phase: Literal["prepare", "go"]
    # Plan and members are left out where this connection has carried them; by `plan_hash` they are found.
    plan: dict[str, Any] = Field(default_factory=dict)  # makara.pipeline.Plan.to_json()
    members: list[Member] = Field(default_factory=list)
    plan_hash: str = ""
    checkpoints: list[CheckpointRef] = Field(default_factory=list)  # published, newest first; the base first
    endpoint: str | None = None  # host:port of the rendezvous on rank 0; present with `go`
    key: str = Field(default="", repr=False)  # by which its members know each other
    saves_only: bool = False  # publish a checkpoint of what it forms with, and hold: take no step


class Orders(Message):
    """Everything that the manager wants of one VM now."""

    type: Literal["orders"] = "orders"
    version: int  # grows with each change; an agent ignores an older one on the same connection
    action: Literal["idle", "profile", "train", "shutdown"]
    job: JobSettings | None = None
    recipe: Recipe | None = None
    generation: GenerationOrder | None = None
    # Generations up to this one are closed: leave them at once, mid-step. A planned generation that is
    # given up while an older one still steps is not abandoned: its order is just replaced by the next.
    abandoned: int = 0
    hold: bool = False  # finish the step, publish a checkpoint, take no further step
    stacks: int = 0  # which time the stacks of all trainers were asked for
    given_up: dict[str, int] = Field(default_factory=dict)  # worker -> end its incarnations up to this one
    lease_s: float = 10.0  # a trainer silent for this long is killed and replaced
    link_timeout_s: float = 10.0  # a member that another cannot reach for this long is lost to it
    measuring_s: float = 30.0  # sections that are not measured by then, of an m that can be missed, are not
    probe_s: float = 12.0  # links that are not measured by then are not, in this generation
    orphan_timeout_s: float = 600.0  # without a manager for this long: save, then end the VM
    log_bytes: int = 16 << 20  # of each log file; as much of what was before is kept beside it
    orphan_save_s: float = 300.0  # for how long a VM that is to end waits for its checkpoint


class Phase(StrEnum):
    """Where a trainer stands."""

    STARTING = "starting"  # importing, unpacking, tracing
    IDLE = "idle"  # ready for a generation
    PROFILING = "profiling"
    FORMING = "forming"  # groups, exchange of records, loading
    RUNNING = "running"
    BROKEN = "broken"  # its generation lost a peer; state kept, waiting for the next generation
    HELD = "held"  # stopped after a checkpoint, as ordered
    LEFT = "left"  # handed over; no part of the current generation
    FINISHED = "finished"  # the last step is published
    EXITED = "exited"  # the process is gone; the agent starts the next incarnation
    OTHER = "other"  # one that this version does not know: it lives, and is left to what it does


class At(StrEnum):
    """What the compute thread of a trainer is at, in the words in which a user reads it."""

    IDLE = "idle"
    COMPUTING = "computing"
    DATA = "waiting for data"  # the job's dataset
    STORE = "waiting for the store"  # reading a checkpoint, or until one is published
    PEER = "waiting for a peer"  # a message of a stage, or sections
    MEMBERS = "waiting for all members"  # while a generation forms
    SUMS = "in the reduction"  # the step's sums and its commit
    OTHER = "at something unknown"  # to this version: it has the longest of all bounds, and is not suspected


class Progress(Message):
    """How far one worker has got."""

    count: Count = 0  # operations, samples, and pieces of what is loaded and saved; it only grows
    at: Annotated[At, or_else(At.OTHER)] = At.IDLE


class Stacks(Message):
    """Where the threads of a trainer stand, as Python shows it, a hundred at most; see `stacks.lead`."""

    worker: Name
    number: Count  # of the orders that asked for it
    text: Text


class Failure(Message):
    """Why a trainer stopped. `kind` user: the job's own code or data raised; retrying cannot help by
    itself. Other: this version does not know the kind; it counts as a death."""

    kind: Annotated[
        Literal["user", "recipe", "internal", "killed", "lease", "stuck", "other"], or_else("other")
    ]
    message: Text
    traceback: Text | None = None
    exit_code: int | None = None


class Formed(Message):
    """How a generation came to be on one worker: the rung it took and where the time went."""

    generation: Count
    step: Count  # the committed step that the generation starts from
    rung: Annotated[Literal["start", "peers", "store", "other"], or_else("other")]
    phases_s: dict[Name, Seconds] = Field(max_length=100)  # groups, exchange, load, ... in seconds


class StepMetrics(Message):
    """One committed step, reported by the first and the last rank."""

    step: Count
    generation: Count
    loss: float  # may be no number, or infinite: it is kept as it is
    grad_norm: float  # likewise
    seconds: Seconds
    samples: Count
    loss_scale: float | None = None  # fp16: what the step's loss was multiplied by
    skipped: bool = False  # fp16: its gradient overflowed and nothing was updated


class WorkerReport(Message):
    """Where one worker (a trainer process on one device) stands."""

    worker: Name
    incarnation: Count = 0
    trainer_protocol: Count = 0  # it meets only trainers of the same
    phase: Annotated[Phase, or_else(Phase.OTHER)]
    generation: Count = 0  # the generation that `phase` speaks of
    prepared: Count = 0  # the highest generation it is prepared for
    endpoint: Name | None = None  # rendezvous it listens on, if it is rank 0 of `prepared`
    graph_hash: Name | None = None  # of the model as traced under the orders' recipe; None: not traced yet
    bits_hash: Name | None = None  # `numerics: exact`: what its kernels make of the sections; see `fitness`
    kernels_hash: Name | None = None  # likewise, without what the job's seed, data and optimizer make of it
    step: Count = 0  # steps committed and applied
    formed: Formed | None = None
    # Workers of `generation` that it cannot reach, each known by a connection of its own; empty where
    # something broke and it does not know who.
    lost: list[Name] = Field(default_factory=list, max_length=MOST_ENTRIES)
    published: CheckpointRef | None = None  # newest checkpoint this trainer published
    store_trouble: Text = (
        ""  # what the store says while this trainer tries again to save or load a checkpoint
    )
    forward_s: Seconds | None = (
        None  # mean compute time of a micro-batch per section (fail-stutter detection)
    )
    backward_s: Seconds | None = None
    failure: Failure | None = None
    # Until the recipe is in the orders:
    profiling: Profiling | None = None  # None: of a version that knows no generations of kind `profile`
    profile: Profile | None = None


class Profiling(Message):
    """Where a worker stands in generations of kind `profile`, whose numbers are their own."""

    prepared: Count = 0  # the highest one that it is prepared for
    endpoint: Name | None = None  # rendezvous it listens on, if it is rank 0 of `prepared`
    generation: Count = 0  # the newest that it went into
    broken: Text = ""  # why that came to nothing
    stage: Annotated[Literal["survey", "sections", "links", "other"], or_else("other")] = "survey"
    done: Count = 0  # sections that it has measured, for each m
    total: Count = 0  # that there are


class Profile(Message):
    """What a generation of kind `profile` found, as its rank 0 tells it: the recipe's model part, and the
    calibration of this hardware."""

    recipe: Recipe
    calibration: JsonObject  # makara.simulator.Calibration.to_json()
    measurements: JsonObject | None = None  # all that it is of: makara.simulator Measurements.to_json()
    stored: bool = False  # they were found in the store, where an earlier job had left them
    note: Text = ""  # why what was found there was not used


class DeviceInfo(Message):
    kind: DeviceKind
    name: Name
    memory_bytes: Count


class Report(Message):
    """Everything that one VM is now, with the deaths and the oldest metrics that are not acknowledged yet."""

    vm: Name
    sequence: Count  # grows with each report of this VM's agent, also when a reboot started it again
    orders_version: Count  # the newest orders it has seen
    address: Name
    devices: list[DeviceInfo] = Field(min_length=1, max_length=MOST_DEVICES)
    workers: list[WorkerReport] = Field(max_length=MOST_DEVICES)
    # The ends of incarnations, oldest first: a later one is in `workers` before anybody has heard of them.
    deaths: list[WorkerReport] = Field(default_factory=list, max_length=MOST_DEATHS)
    metrics: list[StepMetrics] = Field(default_factory=list, max_length=MOST_METRICS)
    progress: list[Progress] = Field(default_factory=list, max_length=MOST_DEVICES)  # of `workers`, in order
    stacks: list[Stacks] = Field(default_factory=list, max_length=MOST_DEVICES)  # until acknowledged
    notice_deadline_s: Finite | None = None  # seconds until the cloud takes the VM, if it said so
    notice: Name = ""  # the cloud's own word for what it will do
    # The cloud was asked since this agent began: where there is no notice, there is none any more.
    notices_known: bool = False
    at_risk: bool = False  # the cloud says that it may take this VM sooner than others
    leaving: Text | None = None  # the VM ends itself, and why
    holding: Text | None = None  # why its trainers hold, whatever the orders say
    keeps_plans: bool = False  # the last `PLANS_KEPT` plans of this connection need not be sent again
    protocol: Count = 1
    makara: Name = ""  # version of the agent

    @model_validator(mode="after")
    def _names_its_own_workers(self) -> Report:
        names = [worker.worker for worker in self.workers]
        for name in [*names, *(dead.worker for dead in self.deaths)]:
            vm, _, index = name.rpartition(".")
            if vm != self.vm or index not in _INDICES:
                raise ValueError(f"worker {name!r}: expected {self.vm}.0, {self.vm}.1, ...")
        if len(set(names)) < len(names):
            raise ValueError(f"workers: each is reported once, not {names}")
        return self


class Beat(Message):
    """A heartbeat of an agent: the VM is what its last report on this connection says, but for `progress`.

    Sent where the `Welcome` says that it is understood. Its frame begins with its type, by which it is told
    from a `Report`.
    """

    type: Literal["beat"] = "beat"
    sequence: Count  # counted with the reports
    progress: list[Progress] = Field(default_factory=list, max_length=MOST_DEVICES)


class ReportAck(Message):
    """The manager has stored what reports carried up to `sequence`. Of beats, few are acknowledged."""

    type: Literal["ack"] = "ack"
    sequence: int


class Welcome(Message):
    """First message of the manager on an agent's connection."""

    type: Literal["welcome"] = "welcome"
    heartbeat_s: float
    server_time: float  # Unix seconds, for logs only
    protocol: int = 1
    makara: str = ""  # version of the manager
    manager: str = ""  # which manager this is: the same over its restarts
    max_report_bytes: int = 1 << 24  # a larger report closes the connection
    beats: bool = False  # a `Beat` is understood in place of a report without news


class Refusal(Message):
    """The manager's own word that a VM has no place with it; the body of the answer to its connection.

    Any other answer (a proxy's, that of another manager at the same address) says nothing about the VM.
    """

    refused: str  # the VM
    manager: str  # as in `Welcome`
    reason: str


class Credential(Message):
    """The token that this VM shows from now on (reconnections, bundle, secrets); it replaces the join
    token.

    Sent right after `Welcome`, and again on a long connection well before the old one ends.
    """

    type: Literal["token"] = "token"
    token: str
    valid_for_s: float


# Frames from the manager to an agent, on the WebSocket `/api/v1/agents/{vm}`; the other way go `Report`s and
# `Beat`s.
ToAgent = Annotated[Welcome | Orders | ReportAck | Credential, Field(discriminator="type")]
TO_AGENT: TypeAdapter[Welcome | Orders | ReportAck | Credential] = TypeAdapter(ToAgent)


METADATA_URL = "http://169.254.169.254"


class NoticeSource(Message):
    """Where the agent of a VM asks whether its cloud will take it."""

    kind: Literal["file", "aws", "azure", "none"] = "file"
    metadata_url: str = METADATA_URL
    # SIGTERM of the agent is a notice of so many seconds; None: the agent ends at once.
    sigterm_s: float | None = Field(default=None, gt=0)


class VmEnding(Message):
    """How the agent of a VM ends it, once it is released, refused or orphaned."""

    kind: Literal["exit", "power_off", "azure"] = "exit"
    metadata_url: str = METADATA_URL
    management_url: str = "https://management.azure.com"
    client_id: str = ""  # of the identity that may delete the VM, where it has several
    identity_id: str = ""  # or its resource's id


class StoreIdentity(Message):
    """How trainers sign in to a store for which their job has no keys."""

    # none: as their process can by itself. Otherwise the agent asks the metadata service for short-lived
    # credentials of the VM and hands them on: trainers cannot reach that service.
    kind: Literal["none", "aws", "azure"] = "none"
    metadata_url: str = METADATA_URL
    identity_id: str = ""  # the id of the resource, where the VM has several


class TrainerUser(Message):
    """As whom an agent that is root runs what is the job's: its `setup` and its trainers."""

    name: str
    home: str
    python: str  # the interpreter, in an environment of this user's own


class BootConfig(Message):
    """What a VM is born with: read by `python -m makara.worker.agent <file>` from a file of mode 0600."""

    vm: str
    job: str
    manager_url: str  # https://host:port; http:// on loopback only
    ca: str | None = None  # whom alone to trust, as PEM; None: the authorities of the system
    join_token: str  # good for one connection; then `Credential` replaces it
    directory: str  # the VM's own folder: unpacked code, logs, state
    address: str = "127.0.0.1"  # the job's private address, to which everything that listens is bound
    num_devices: int = Field(default=1, ge=1)
    device_kind: Literal["auto", "cpu", "cuda"] = "auto"
    device_memory_bytes: int | None = None  # a cap on what one worker may use; None is all that there is
    notices: NoticeSource = NoticeSource()
    ending: VmEnding = VmEnding()
    store_identity: StoreIdentity = StoreIdentity()
    trainer_user: TrainerUser | None = None  # None: the agent's own


class NoticeFile(Message):
    """`notice.json` in a local VM's folder: the stand-in for a cloud's notice of preemption. Removed: it is
    withdrawn."""

    deadline_s: float  # seconds from `written_at` until the VM is killed
    written_at: float  # Unix seconds


WorkerReport.model_rebuild()
