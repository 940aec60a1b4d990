"""Facts about generations: planned, prepared, opened, formed, stalled and closed; and their checkpoints."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from ....protocol.messages import CheckpointRef, Corruption, Formed, Miscount
from ..alternatives import Alternative
from .base import BaseFact


class GenerationKind(StrEnum):
    """What a generation is for. The numbers of each kind are its own."""

    TRAIN = "train"
    PROFILE = "profile"  # its members measure the model and their links; it has neither plan nor head


class GenerationPlanned(BaseFact):
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
    best_until: float | None = None  # if not the fastest: then the planner is asked again
    alternatives: tuple[Alternative, ...] = ()  # the one taken first; () in journals of earlier versions


class PlanKept(BaseFact):
    """Generation `generation` goes on though another plan could take its place: it is worth as much. `until`:
    when that is asked again, as of then; None: not for this cause."""

    fact: Literal["plan_kept"] = "plan_kept"
    generation: int
    cause: str
    until: float | None
    alternatives: tuple[Alternative, ...]  # what goes on first


class GenerationPrepared(BaseFact):
    """Every member is prepared; the head is being swapped, and older generations may not publish any more."""

    fact: Literal["generation_prepared"] = "generation_prepared"
    number: int
    endpoint: str


class GenerationOpened(BaseFact):
    """The head is swapped, where there is one: members may switch."""

    fact: Literal["generation_opened"] = "generation_opened"
    kind: GenerationKind = GenerationKind.TRAIN
    number: int
    endpoint: str
    checkpoints: tuple[CheckpointRef, ...]


class StepInterrupted(BaseFact):
    """The members of the open generation `number` form it at once, in the middle of a step of the one that it
    supersedes, and finish that step in it from what they hold."""

    fact: Literal["step_interrupted"] = "step_interrupted"
    number: int
    superseded: int  # the generation whose step it is
    reason: str


class GenerationFormed(BaseFact):
    fact: Literal["generation_formed"] = "generation_formed"
    number: int
    formed: Formed
    lost_steps: int  # committed before, done again now


class GenerationStalled(BaseFact):
    """No member has made progress for longer than the bound: the stacks of all are asked for.

    `silent_s`: seconds without progress, under the name that journals have always had for it; the members'
    reports may have come all the while.
    """

    fact: Literal["generation_stalled"] = "generation_stalled"
    generation: int
    number: int  # of stalls of this job
    step: int
    silent_s: float
    bound_s: float
    standing: dict[str, str]  # worker -> what it is at
    suspects: tuple[str, ...]  # whose own work stands still
    doublings: int = 0  # read by nothing: journals of earlier versions have it


class StacksTaken(BaseFact):
    """Where all threads of a worker stood."""

    fact: Literal["stacks_taken"] = "stacks_taken"
    number: int
    worker: str
    text: str


class StepMiscounted(BaseFact):
    """The sums of an attempt at a step did not hold each micro-batch's gradients exactly once: it is redone,
    and after a few such attempts the trainers end."""

    fact: Literal["step_miscounted"] = "step_miscounted"
    miscount: Miscount
    worker: str  # one that told


class StateCorrupted(BaseFact):
    """Hosts of a section held different state. All members dropped theirs, and no state of this generation
    or an older one counts any more; the next generation starts from the newest checkpoint. Once more for the
    same generation if a later report names suspects."""

    fact: Literal["state_corrupted"] = "state_corrupted"
    corruption: Corruption
    worker: str  # one that reported it


class GenerationClosed(BaseFact):
    fact: Literal["generation_closed"] = "generation_closed"
    kind: GenerationKind = GenerationKind.TRAIN
    number: int
    reason: str


class PlanImpossible(BaseFact):
    fact: Literal["plan_impossible"] = "plan_impossible"
    generation: int
    reason: str


class CopiesChanged(BaseFact):
    """Each section of the generation lives on so many of its VMs; `wanted`: what the job file asks for.

    `enough_vms`: where these are fewer, with so many VMs as they are there would be enough.
    """

    fact: Literal["copies_changed"] = "copies_changed"
    generation: int
    copies: int
    wanted: int
    num_vms: int
    enough_vms: int | None = None  # None, as in journals of earlier versions: not known


class CheckpointPublished(BaseFact):
    fact: Literal["checkpoint_published"] = "checkpoint_published"
    checkpoint: CheckpointRef


class CheckpointDamaged(BaseFact):
    """Workers could not read a published checkpoint and began from `instead`, an older one. It is set aside:
    no generation starts from it, and it does not count among those that are kept. `why` names the object."""

    fact: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    checkpoint: CheckpointRef
    instead: CheckpointRef
    why: str


class CheckpointRetired(BaseFact):
    """Chosen for deletion by the retention rule."""

    fact: Literal["checkpoint_retired"] = "checkpoint_retired"
    checkpoint: CheckpointRef
