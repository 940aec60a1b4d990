"""A job as its facts tell it: an immutable value, folded by `apply` and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from ...protocol.messages import CheckpointRef, Formed, Miscount, Recipe
from ..spec.job_spec import JobSpec
from ..spec.start_source import StartSource
from .facts import CheckpointDamaged, GenerationKind, JobEnded, Resumption, StartCopied
from .strikes.ledger import Ledger
from .strikes.table import Kind
from .vm_table import VmTable
from .vms import Bill, Enough, Losses, Spent, Vm, VmStatus


class Incarnation(NamedTuple):
    """A worker, and a number that grows with each start of its trainer."""

    worker: str
    number: int


class Status(StrEnum):
    """What a user sees of a job."""

    PENDING = "pending"  # no VM has joined, or too few are left
    STARTING = "starting"  # VMs are there, trainers come up
    PROFILING = "profiling"  # a generation of kind `profile` measures the model
    RUNNING = "running"
    MORPHING = "morphing"  # a change of plan is under way
    WAITING = "waiting"  # for a person: `JobState.waiting` says for what
    STOPPING = "stopping"
    EXPORTING = "exporting"  # trained; the weights are being written
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation from its decision to its end: planned, prepared, opened, formed, closed or superseded.

    One of kind `profile` is never formed, and ends with the recipe.
    """

    number: int
    cause: str
    plan: Mapping[str, Any]  # makara.pipeline.Plan.to_json(); empty once in the history, or without one
    shape: str  # P×D as `Plan.shape` writes it; empty without a plan
    members: tuple[Incarnation, ...]  # the plan's workers in rank order, then donors
    num_workers: int
    detected_at: float
    planned_at: float
    decided_s: float
    predicted_s: float | None
    endpoint: str | None = None
    prepared_at: float | None = None
    opened_at: float | None = None
    checkpoints: tuple[CheckpointRef, ...] = ()
    formed: Formed | None = None
    formed_at: float | None = None
    lost_steps: int = 0
    interrupted: int = 0  # the generation that it cut off in the middle of a step; 0: none
    ended_at: float | None = None
    end_reason: str = ""
    saves_only: bool = False
    best_until: float | None = None
    kind: GenerationKind = GenerationKind.TRAIN

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """The plan's workers in rank order, without donors."""
        return self.members[: self.num_workers]


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker that is slower than its peers."""

    slowdown: float
    incarnation: int
    since: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The newest time that no member of a generation made progress; `seen`: whose stacks have come."""

    number: int
    generation: int
    suspects: tuple[str, ...]
    seen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a person must decide, and what the head has, where that is the question."""

    since: float
    reason: str
    offers: tuple[Resumption, ...]
    vms_until: float  # its VMs are kept till then if they do nothing that counts; see `vms_kept_until`
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()
    console: str = ""  # the end of what a VM wrote that did not join; not to be trusted


def empty_mapping() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class JobState:
    """Everything that was decided about one job. The empty state is `JobState()`."""

    job: str = ""
    spec: JobSpec | None = None
    bundle_sha256: str = ""
    submitted_at: float = 0.0
    owner: str | None = None  # None: the administrators
    start: StartSource | None = None  # the checkpoint of another job that it starts from
    copied: StartCopied | None = None  # how the checkpoint in `start` became the job's own
    num_facts: int = 0  # facts folded so far; the version of orders
    told_at: float = 0.0  # when the newest of them was decided, by the clock of that time
    vms: VmTable[Vm] = field(default_factory=VmTable[Vm])
    leaving: Mapping[str, Vm] = field(default_factory=empty_mapping)  # VMs that ended, and may still exist
    spent: Spent = field(default_factory=Spent)  # for VMs that are gone
    bills: VmTable[Bill] = field(default_factory=VmTable[Bill])  # of VMs that are gone and cost anything
    spot_absent_since: float | None = None
    joined_from: frozenset[str] = frozenset()  # origins of VMs; see `fold.renting.origin_of`
    enough: Enough | None = None  # no more VMs are asked for than this for a while; see `rules.surplus`
    losses: Losses = field(default_factory=Losses)
    profiler: Incarnation | None = None  # rank 0 of the newest generation of kind `profile`
    profile: Generation | None = None  # of that kind, planned or opened, until the recipe is fixed
    last_profile: int = 0  # highest number ever given to a generation of kind `profile`
    recipe: Recipe | None = None
    calibration: Mapping[str, Any] | None = None  # of the recipe's m: what plans are simulated with
    measurements: Mapping[str, Any] | None = None  # what `calibration` is made of: Measurements.to_json()
    recalibrated_at: float | None = None
    slow: Mapping[str, Slow] = field(default_factory=empty_mapping)
    paces_changed_at: float = 0.0  # when a calibration, or who is slow, changed last
    recipe_version: int = 0  # num_facts when the recipe was fixed
    planned: Generation | None = None  # decided, not opened
    current: Generation | None = None  # opened, not closed
    # Sections (start, stop) of each worker of the newest generation that formed, which may be closed.
    hosts: Mapping[Incarnation, tuple[int, int]] = field(default_factory=empty_mapping)
    # The plan of that generation, whose workers in rank order are `hosts`.
    hosts_plan: Mapping[str, Any] = field(default_factory=empty_mapping)
    # Closed and superseded, oldest first, without their plans; members only since the last that was opened:
    history: tuple[Generation, ...] = ()
    last_generation: int = 0  # highest number ever given to a generation
    started_after: int = 0  # `last_generation` when the job began, or went on after its end
    continued_after: int = 0  # num_facts when it last went on after its end
    head_generation: int = 0  # highest number for which the head may have been swapped
    opened_generation: int = 0  # the number that the head has reached for certain
    discarded: int = 0  # what generations up to this one made, a person chose to go on without
    restarting: bool = False  # the next head begins without any checkpoint
    waiting: Waiting | None = None  # a person must say how to go on
    answered: Resumption | None = None  # what a person said last
    abandoned: int = 0  # generations up to this one are closed
    published: tuple[CheckpointRef, ...] = ()  # oldest first, by (generation, step)
    damaged: tuple[CheckpointDamaged, ...] = ()  # not in `published`; the head lists them until they retire
    retired: tuple[int, int] = (0, -1)  # newest (generation, step) that was retired
    base: CheckpointRef | None = None  # what the last opened generation may start from
    progress_step: int = 0  # highest step known to have been committed by what was journalled
    hold: bool = False
    stop_ordered_at: float | None = None
    failure: JobEnded | None = None  # how the job ends once its workers have saved; see `StopOrdered`
    finished: CheckpointRef | None = None
    ended: JobEnded | None = None
    ended_at: float | None = None
    # {worker: its last incarnation that failed}
    failed: Mapping[str, int] = field(default_factory=empty_mapping)
    given_up: Mapping[str, int] = field(default_factory=empty_mapping)  # as `failed`, of those to be ended
    stall: Stall | None = None
    miscounts: int = 0  # attempts at steps whose sums did not hold each micro-batch's gradients once
    newest_miscount: tuple[int, int, int] = (0, -1, -1)  # see `order_of_miscount`
    void_until: int = 0  # the newest generation in which hosts of a section held different state
    # {worker: why it cannot meet the recipe}
    unfit: Mapping[str, str] = field(default_factory=empty_mapping)
    strikes: Ledger = field(default_factory=Ledger)
    isolated: bool = False  # as last told to the user; `core.silence` judges
    newest_unfit: str = ""  # the newest VM ended as unfit; empty once a VM as new takes part
    last_traceback: str | None = None
    last_error: str = ""
    few_copies: int | None = None  # VMs under each section, if fewer than `resilience` asks for
    enough_vms: int | None = None  # ... and with how many VMs that would be had, if that is known
    impossible: str | None = None  # why nothing runs, as last told to the user

    @property
    def copying(self) -> bool:
        """The checkpoint of another job that it starts from is not copied yet."""
        return self.start is not None and self.copied is None

    @property
    def active(self) -> bool:
        """Submitted and ready to start, and neither waiting, stopping, trained nor ended: VMs and plans are
        wanted."""
        if self.spec is None or self.waiting is not None or self.copying:
            return False
        return not self.ended and not self.finished and self.stop_ordered_at is None

    @property
    def vms_idle_since(self) -> float | None:
        """Since when its VMs do nothing that counts while it waits for a person, Unix seconds.

        None if it does not wait, or as long as a generation steps that the head lets publish.
        """
        waiting, current = self.waiting, self.current
        if waiting is None:
            return None
        if current is not None and waiting.head_generation == current.number and not self.hold:
            return None
        ended_at = self.history[-1].ended_at if current is None and self.history else None
        return max(waiting.since, ended_at or 0.0)

    @property
    def vms_kept_until(self) -> float | None:
        """When the VMs of a job that waits are saved from and released, Unix seconds; None: not before the
        generation that steps has ended."""
        since = self.vms_idle_since
        if self.waiting is None or since is None:
            return None
        return since + self.waiting.vms_until - self.waiting.since

    @property
    def never_joined(self) -> int:
        """How many VMs of one origin in a row did not join, at most."""
        return max((found.count for found in self.strikes.all(Kind.NOT_JOINED).values()), default=0)

    def possible(self, step: int) -> int:
        """The step that a worker reports, which may lie: no job has steps beyond its last one."""
        return min(step, self.spec.training.steps) if self.spec is not None else step

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is published; 0 without any."""
        return self.published[-1].step if self.published else 0

    @property
    def why_unfit(self) -> str:
        """Why the newest worker that is unfit is so; empty if none is."""
        return list(self.unfit.values())[-1] if self.unfit else ""

    @cached_property
    def live_vms(self) -> tuple[Vm, ...]:
        """In the order in which they were requested."""
        return tuple(self.vms.live.values())

    @property
    def counted_vms(self) -> tuple[Vm, ...]:
        """Those that live, and those that are not gone for certain: bounds and caps count them all."""
        return (*self.live_vms, *self.leaving.values())

    @property
    def running(self) -> bool:
        """A formed generation exists."""
        return self.current is not None and self.current.formed is not None

    @property
    def status(self) -> Status:
        if self.ended is not None:
            return Status(self.ended.status)
        if self.waiting is not None:
            return Status.WAITING
        if self.finished is not None:
            return Status.EXPORTING
        if self.stop_ordered_at is not None:
            return Status.STOPPING
        if self.planned is not None or (self.current is not None and not self.running):
            is_first = self.last_generation == self.started_after + 1
            return Status.STARTING if is_first else Status.MORPHING
        if self.running:
            return Status.RUNNING
        if not any(vm.joined for vm in self.live_vms):
            return Status.PENDING
        if self.recipe is None and self.profiler is not None:
            return Status.PROFILING
        return Status.STARTING if self.last_generation == self.started_after else Status.PENDING

    def generation(self, number: int) -> Generation | None:
        """The planned or current generation of this number."""
        return next((g for g in (self.planned, self.current) if g is not None and g.number == number), None)

    def has_failed(self, incarnation: Incarnation) -> bool:
        """Whether this trainer, or a later one of its worker, is known to have failed."""
        return self.failed.get(incarnation.worker, -1) >= incarnation.number

    def changed(self, **changes: Any) -> JobState:
        """As `dataclasses.replace`, which sets each of the fields anew: every fact makes two states."""
        assert changes.keys() <= JobState.__dataclass_fields__.keys(), "only fields change"
        made = copy(self)
        if "vms" in changes:
            vars(made).pop("live_vms", None)
        vars(made).update(changes)
        return made

    def with_vm(self, vm: Vm) -> JobState:
        return self.changed(vms=self.vms.with_vm(vm))


def wanted_vms(state: JobState) -> int:
    """How many VMs are asked for: `max_nodes`, and none beyond those that a plan could give work.

    Each worker has at least one section of one micro-batch.
    """
    assert state.spec is not None, "VMs are for submitted jobs"
    resources, parallelism, recipe = state.spec.resources, state.spec.parallelism, state.recipe
    if recipe is None:
        return resources.max_nodes
    depth = parallelism.pipeline_parallel_degree or recipe.num_sections
    replicas = parallelism.data_parallel_degree or recipe.num_micro_batches
    most = -(-depth * replicas // resources.workers_per_node)
    return max(resources.min_nodes, min(resources.max_nodes, most))


def staying_vms(state: JobState) -> tuple[Vm, ...]:
    """Those that live, without those that the cloud takes, or may take sooner than others."""
    return tuple(vm for vm in state.live_vms if vm.status is not VmStatus.NOTICED and not vm.at_risk)


def vms_of(generation: Generation) -> frozenset[str]:
    """The VMs that its plan uses."""
    return frozenset(vm_of(worker) for worker, _ in generation.incarnations)


def vm_of(worker: str) -> str:
    """The VM of a worker id `<vm>.<index>`."""
    return worker.rpartition(".")[0]


def order_of_miscount(miscount: Miscount) -> tuple[int, int, int]:
    """(generation, step, attempt): a trainer's later miscounts come later."""
    return miscount.generation, miscount.step, miscount.attempt


def order_of(checkpoint: CheckpointRef) -> tuple[int, int]:
    """Newer checkpoints are greater: a later generation's always lies on the surviving history."""
    return checkpoint.generation, checkpoint.step
