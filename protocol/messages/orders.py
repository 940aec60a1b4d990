"""What the manager wants of a VM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import Field

from ..instruction_sets import InstructionSet
from .base import CheckpointRef, Message
from .recipe import Recipe


class StoreConfig(Message):
    """Where a job's checkpoints live. Credentials come from the environment (AWS_ACCESS_KEY_ID,
    AZURE_STORAGE_KEY, ...)."""

    uri: str  # file:///abs/path, s3://bucket/prefix or az://container/prefix
    endpoint: str | None = None  # of an S3-compatible service (None is AWS) or of an Azure account
    region: str | None = None


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
    """Generation `number`: get ready for it (`prepare`), then switch to it (`go`).

    Plan and members grow with the cluster, so only the VM of rank 0 is told them. It gives them to the others
    at the rendezvous, who check them by `plan_hash`.
    """

    number: int = Field(ge=1)
    # Those of kind `profile` measure the model, have no plan, and are numbered by themselves.
    kind: Literal["train", "profile"] = "train"
    phase: Literal["prepare", "go"]
    first: str = ""  # the worker of rank 0
    ranks: dict[str, int] = Field(default_factory=dict)  # of the VM's own workers that take part
    plan: dict[str, Any] = Field(default_factory=dict)  # makara.pipeline.Plan.to_json(); for rank 0's VM
    members: list[Member] = Field(default_factory=list)  # by rank; for rank 0's VM
    plan_hash: str = ""  # see the function of this name
    checkpoints: list[CheckpointRef] = Field(default_factory=list)  # published, newest first; the base first
    endpoint: str | None = None  # host:port of the rendezvous on rank 0; present with `go`
    key: str = Field(default="", repr=False)  # by which its members know each other
    void_until: int = 0  # states that were agreed on in generations up to this one may be wrong everywhere
    saves_only: bool = False  # publish a checkpoint of what it forms with, and hold: take no step

    @classmethod
    def of(
        cls, members: Sequence[Member], plan: dict[str, Any] | None = None, **fields: Any
    ) -> GenerationOrder:
        """The order with all that its members know between them; `fields` are the others."""
        return cls(
            first=members[0].worker,
            ranks={member.worker: rank for rank, member in enumerate(members)},
            plan=plan or {},
            members=list(members),
            plan_hash=plan_hash(plan or {}, members),
            **fields,
        )

    def told_to(self, workers: Collection[str]) -> GenerationOrder:
        """What the VM of these workers is told."""
        own = {worker: self.ranks[worker] for worker in workers}
        left_out = {} if 0 in own.values() else {"plan": {}, "members": []}
        return self.model_copy(update={"ranks": own, **left_out})


def plan_hash(plan: dict[str, Any], members: Sequence[Member]) -> str:
    """SHA-256 of a plan and the members that form it."""
    named = [[member.worker, member.address] for member in members]
    return hashlib.sha256(json.dumps([plan, named], sort_keys=True).encode()).hexdigest()


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
