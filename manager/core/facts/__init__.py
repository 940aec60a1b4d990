"""Facts: what the core decides. They are journalled; the state of a job is their fold and nothing else."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .generations import (
    CheckpointDamaged,
    CheckpointPublished,
    CheckpointRetired,
    CopiesChanged,
    GenerationClosed,
    GenerationFormed,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    GenerationStalled,
    PlanImpossible,
    PlanKept,
    StacksTaken,
    StateCorrupted,
    StepInterrupted,
    StepMiscounted,
)
from .generations import GenerationKind as GenerationKind
from .job import (
    HoldChanged,
    JobContinued,
    JobEnded,
    JobResumed,
    PersonNeeded,
    StartCopied,
    StopOrdered,
    Submitted,
    TrainingFinished,
)
from .job import Resumption as Resumption
from .old import Obsolete
from .vms import (
    AttemptMade,
    AttemptRefused,
    CostNoted,
    GrowthWeighed,
    IsolationChanged,
    ManagerAway,
    VmCreated,
    VmDrained,
    VmEnded,
    VmGone,
    VmJoined,
    VmNoticed,
    VmNoticeWithdrawn,
    VmNotReleased,
    VmRequested,
    VmRiskChanged,
    VmSeen,
    VmYielded,
)
from .vms import EndReason as EndReason
from .vms import RefusalKind as RefusalKind
from .workers import BitsFixed, Recalibrated, RecipeFixed, WorkerFailed, WorkerPaced

Fact = Annotated[
    Submitted
    | StartCopied
    | VmRequested
    | GrowthWeighed
    | AttemptMade
    | AttemptRefused
    | VmCreated
    | VmJoined
    | VmNoticed
    | VmNoticeWithdrawn
    | VmRiskChanged
    | VmDrained
    | VmYielded
    | VmEnded
    | VmGone
    | VmNotReleased
    | CostNoted
    | ManagerAway
    | VmSeen
    | IsolationChanged
    | WorkerFailed
    | RecipeFixed
    | Obsolete
    | BitsFixed
    | Recalibrated
    | WorkerPaced
    | GenerationPlanned
    | PlanKept
    | GenerationPrepared
    | GenerationOpened
    | StepInterrupted
    | GenerationFormed
    | GenerationStalled
    | StacksTaken
    | StateCorrupted
    | StepMiscounted
    | GenerationClosed
    | PlanImpossible
    | CopiesChanged
    | CheckpointPublished
    | CheckpointDamaged
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
