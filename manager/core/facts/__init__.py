"""Facts: what the core decides. They are journalled; the state of a job is their fold and nothing else."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .generations import (
    CheckpointPublished,
    CheckpointRetired,
    GenerationClosed,
    GenerationFormed,
    GenerationKind,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    GenerationStalled,
    PlanImpossible,
    StacksTaken,
)
from .job import (
    HoldChanged,
    JobContinued,
    JobEnded,
    JobResumed,
    PersonNeeded,
    Resumption,
    StartCopied,
    StopOrdered,
    Submitted,
    TrainingFinished,
)
from .old import Obsolete
from .vms import (
    AttemptMade,
    AttemptRefused,
    CostNoted,
    EndReason,
    IsolationChanged,
    RefusalKind,
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
)
from .workers import BitsFixed, Recalibrated, RecipeFixed, WorkerFailed, WorkerPaced

__all__ = [
    "AttemptMade",
    "AttemptRefused",
    "BitsFixed",
    "CheckpointPublished",
    "CheckpointRetired",
    "CostNoted",
    "EndReason",
    "Fact",
    "GenerationClosed",
    "GenerationFormed",
    "GenerationKind",
    "GenerationOpened",
    "GenerationPlanned",
    "GenerationPrepared",
    "GenerationStalled",
    "HoldChanged",
    "IsolationChanged",
    "JobContinued",
    "JobEnded",
    "JobResumed",
    "Obsolete",
    "PersonNeeded",
    "PlanImpossible",
    "Recalibrated",
    "RecipeFixed",
    "RefusalKind",
    "Resumption",
    "StacksTaken",
    "StartCopied",
    "StopOrdered",
    "Submitted",
    "TrainingFinished",
    "VmCreated",
    "VmDrained",
    "VmEnded",
    "VmGone",
    "VmJoined",
    "VmNotReleased",
    "VmNoticeWithdrawn",
    "VmNoticed",
    "VmRequested",
    "VmRiskChanged",
    "WorkerFailed",
    "WorkerPaced",
]

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
