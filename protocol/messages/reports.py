"""What a VM and its workers are, as they report it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..bounds import (
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
from ..unknown_values import or_else
from .base import PROTOCOL, CheckpointRef, DeviceKind, Message
from .recipe import Recipe

_INDICES = frozenset(str(index) for index in range(MOST_DEVICES))


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
    itself. Unreadable: none of the job's checkpoints can be read. Other: this version does not know the kind;
    it counts as a death."""

    kind: Annotated[
        Literal["user", "recipe", "internal", "killed", "lease", "stuck", "unreadable", "other"],
        or_else("other"),
    ]
    message: Text
    traceback: Text | None = None
    exit_code: int | None = None


class KeptContributions(Message):
    """What a generation took over of the step that was cut off, in contributions of a micro-batch to a sum of
    gradients. `moved`: those of the kept ones that were sent to another worker; `dropped`: those that members
    short of memory dropped, some of which others may have had."""

    kept: Count
    moved: Count
    missing: Count
    dropped: Count = 0


class DamagedCheckpoint(Message):
    """A published checkpoint that some member of a generation could not read. `why` names the object."""

    checkpoint: CheckpointRef
    why: Text


class Formed(Message):
    """How a generation came to be on one worker: the rung it took and where the time went."""

    generation: Count
    step: Count  # the committed step that the generation starts from
    rung: Annotated[Literal["start", "peers", "store", "other"], or_else("other")]
    # Of joining it, in order: rendezvous, agree, links, groups, load, ready.
    phases_s: dict[Name, Seconds] = Field(max_length=100)
    in_flight: KeptContributions | None = None  # None: the step begins whole
    # Rung store: the newer checkpoints that were tried first, in that order.
    skipped: list[DamagedCheckpoint] = Field(default_factory=list, max_length=MOST_ENTRIES)


class StepMetrics(Message):
    """One committed and applied step, reported by the first and the last rank."""

    step: Count  # number of steps committed, this one included
    generation: Count
    loss: float  # may be no number, or infinite: it is kept as it is
    grad_norm: float  # likewise
    seconds: Seconds  # from its beginning to its application, including interruptions
    samples: Count
    loss_scale: float | None = None  # fp16: what the step's loss was multiplied by
    skipped: bool = False  # fp16: its gradient overflowed and nothing was updated


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


class Miscount(Message):
    """The newest attempt at a step whose sums did not hold each micro-batch's gradients exactly once. All
    workers of the generation find so alike, and redo the step or end."""

    generation: Count
    step: Count  # committed before it
    attempt: Count  # of this step, from 0; one whose gradients overflowed counts


class Corruption(Message):
    """Hosts of a section had different state: memory, a processor or a link changed bits without an error.
    All workers of the generation find so alike, and drop their state."""

    generation: Count
    step: Count  # committed when it was found
    sections: list[Count] = Field(max_length=MOST_ENTRIES)
    # Workers whose state is not that of most hosts of a section; where there is no majority, all its hosts.
    suspects: list[Name] = Field(default_factory=list, max_length=MOST_ENTRIES)
    has_majority: bool = False  # most hosts of each such section agree, so that the suspects are wrong


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
    # What the store says while this trainer tries again to save or load a checkpoint.
    store_trouble: Text = ""
    fenced: Count = 0  # the newest generation whose checkpoint was refused: the head is open for another
    # Mean compute time of one forward, and of one backward, of a micro-batch through all of the worker's
    # sections in the newest step: a worker that is slower than its peers is found by these.
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    failure: Failure | None = None
    miscount: Miscount | None = None
    corruption: Corruption | None = None  # the newest
    # Until the recipe is in the orders:
    profiling: Profiling | None = None  # None: of a version that knows no generations of kind `profile`
    profile: Profile | None = None


class DeviceInfo(Message):
    kind: DeviceKind
    name: Name
    memory_bytes: Count


class Report(Message):
    """Everything that one VM is now, with deaths and the oldest metrics not sent on this connection yet."""

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
    protocol: Count = PROTOCOL
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
