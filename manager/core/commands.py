"""Commands: what the effects must do. They are idempotent and keyed.

Messages to agents are no commands: they are a projection of the state (`manager.core.orders`), sent again
whenever it changes or an agent connects.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...protocol.messages import CheckpointRef
from ..spec.frozen import Frozen
from ..spec.placement import Attempt
from ..spec.start_source import StartSource


class _Command(Frozen):
    """`ordered_after`: how many facts the job had when it was ordered."""

    key: str
    ordered_after: int = 0


class RequestVm(_Command):
    """Have the VM of `attempt` exist; answer with `AttemptSucceeded` or `AttemptFailed`.

    `attempt` None, as in commands of earlier versions: the first, at the job's provider.
    """

    command: Literal["request_vm"] = "request_vm"
    vm: str
    attempt: Attempt | None = None


class ReleaseVm(_Command):
    """Have nothing of the VM exist; answer with `VmTerminated` once that is certain.

    `console`: before that, what it wrote is read while it is there, and told by `ConsoleRead`.
    """

    command: Literal["release_vm"] = "release_vm"
    vm: str
    console: bool = False


class WorkerSlot(Frozen):
    worker: str
    vm: str
    memory_bytes: int
    slowdown: float = 1.0  # of its compute times, compared with its peers


class DeathRisk(Frozen):
    """See `morphing.Risk`, whose fields these are."""

    losses_per_s: float
    mean_size: float
    redo_s: float
    redo_steps: float
    form_s: float = 0.0  # 0, as in commands of earlier versions: deaths that leave state cost nothing


class ComputePlan(_Command):
    """Run the planner off the event loop for these workers; answer with `PlanComputed`.

    `reconsider`: the plan that runs could stay, so it is weighed as well: it goes on unless another is worth
    more by `least_gain`, a part of what it does. `change_s`: for how long nothing steps while another forms,
    as measured. `lasts_s`: for how long the plan is expected to run; None, as in commands of earlier
    versions: it is not one that rerouting could serve.
    `fewer_copies_s`: for how long a rerouted plan may have fewer copies of a section than could be had, where
    the job asks for several.
    `ends_s`: when it ends though nothing is lost; None: no such end is foreseen.
    `risk`: None, as in commands of earlier versions: deaths are not weighed.
    """

    command: Literal["compute_plan"] = "compute_plan"
    generation: int
    workers: tuple[WorkerSlot, ...]
    reconsider: bool = False
    least_gain: float = 0.0
    change_s: float = 0.0
    lasts_s: float | None = None
    fewer_copies_s: float = 0.0
    ends_s: float | None = None
    risk: DeathRisk | None = None

    @property
    def asked(self) -> frozenset[str]:
        """The workers that it is about."""
        return frozenset(slot.worker for slot in self.workers)


class ComputeGrowth(_Command):
    """Ask the planner for the fewest VMs more, of up to `most`, that are worth more by `least_gain`, a part
    of what is done with them; answer with `GrowthComputed`.

    `workers`: of the VMs that are there or on their way. `more`: those that one VM more would have.
    `change_s`, `ends_s` and `risk` as in `ComputePlan`.
    """

    command: Literal["compute_growth"] = "compute_growth"
    workers: tuple[WorkerSlot, ...]
    more: tuple[WorkerSlot, ...]
    most: int
    least_gain: float
    change_s: float = 0.0
    ends_s: float | None = None
    risk: DeathRisk | None = None


class OpenHead(_Command):
    """Swap head.json to `generation` (fencing all older ones); answer with `HeadOpened`.

    The head must have reached generation `opened` (0: there need be none yet; None, as in commands of earlier
    versions: whatever it has), none beyond `tried` but this one, and list `checkpoints`, as the journal
    knows; else nothing is changed, and the answer is `HeadDiffers`. So it is if it has this generation
    already, but by another `opener`. `restart`: whatever it lists, it is to begin anew without any
    checkpoint.
    """

    command: Literal["open_head"] = "open_head"
    generation: int
    opener: int = 0  # 0, as in commands of earlier versions: whoever
    opened: int | None = None
    tried: int | None = None  # None, as in commands of earlier versions: whatever it has
    checkpoints: tuple[CheckpointRef, ...] = ()
    restart: bool = False


class DeleteCheckpoint(_Command):
    """Take a checkpoint out of the head, then, `lease_s` after it left it, delete its parts."""

    command: Literal["delete_checkpoint"] = "delete_checkpoint"
    checkpoint: CheckpointRef
    not_before: float
    lease_s: float = 60.0


class SweepStore(_Command):
    """Remove what the job left in the store and nobody needs any more, and see what its head lists; answer
    with `HeadSeen`."""

    command: Literal["sweep_store"] = "sweep_store"
    not_before: float
    lease_s: float


class ExportWeights(_Command):
    """Export the weights of `checkpoint`, or of the first of `older` if it cannot be read; answer with
    `WeightsExported`."""

    command: Literal["export_weights"] = "export_weights"
    checkpoint: CheckpointRef
    older: tuple[CheckpointRef, ...] = ()  # newest first


class CopyCheckpoint(_Command):
    """Copy the checkpoint that the job starts from, and list it in its head; answer with
    `CheckpointCopied`."""

    command: Literal["copy_checkpoint"] = "copy_checkpoint"
    source: StartSource


class StoreCalibration(_Command):
    """Leave the job's measurements in its store, under their fingerprint, for jobs to come."""

    command: Literal["store_calibration"] = "store_calibration"


Command = Annotated[
    RequestVm
    | ReleaseVm
    | ComputePlan
    | ComputeGrowth
    | OpenHead
    | DeleteCheckpoint
    | SweepStore
    | ExportWeights
    | CopyCheckpoint
    | StoreCalibration,
    Field(discriminator="command"),
]
