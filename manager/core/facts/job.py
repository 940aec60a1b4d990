"""Facts about the job as a whole: how it begins, holds, waits for a person, goes on and ends."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from ....protocol.messages import CheckpointRef
from ...spec.start_source import StartSource
from .base import BaseFact


class Submitted(BaseFact):
    """`owner`: the name of the user whose job it is; None: the administrators', as all jobs of older versions
    are."""

    fact: Literal["submitted"] = "submitted"
    job: str
    spec: dict[str, Any]
    bundle_sha256: str
    start: StartSource | None = None
    owner: str | None = None


class StartCopied(BaseFact):
    """The checkpoint that the job starts from is its own now, as `checkpoint`; it was `source` of the other.

    `source` None: it was copied before, and the answer was lost. `skipped`: why it is not the newest of the
    other job; empty if it is.
    """

    fact: Literal["start_copied"] = "start_copied"
    checkpoint: CheckpointRef
    source: CheckpointRef | None
    skipped: str = ""


class HoldChanged(BaseFact):
    """Whether workers stop after a checkpoint, because too few VMs would remain."""

    fact: Literal["hold_changed"] = "hold_changed"
    hold: bool
    reason: str


class TrainingFinished(BaseFact):
    """The last step is committed and published."""

    fact: Literal["training_finished"] = "training_finished"
    checkpoint: CheckpointRef


class Resumption(StrEnum):
    """What a person may have a waiting job do."""

    AGAIN = "again"  # try once more: what was wrong was put right
    FROM_HEAD = "from_head"  # go on from what the head lists, whatever the journal knows
    RESTART = "restart"  # begin at step 0, without any checkpoint


class PersonNeeded(BaseFact):
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


class JobResumed(BaseFact):
    """A person's answer. With `from_head`, `checkpoints` are those that exist from now on."""

    fact: Literal["job_resumed"] = "job_resumed"
    how: Resumption
    head_generation: int = 0
    checkpoints: tuple[CheckpointRef, ...] = ()


class JobContinued(BaseFact):
    """A person has a job go on that was stopped or failed, on so many VMs, which may cost so much.

    Failures are counted anew."""

    fact: Literal["job_continued"] = "job_continued"
    min_nodes: int
    max_nodes: int
    max_hourly_cost: float | None = None  # None: as it was
    budget: float | None = None  # of the job's whole life; None: as it was


class JobEnded(BaseFact):
    fact: Literal["job_ended"] = "job_ended"
    status: Literal["finished", "stopped", "failed"]
    reason: str = ""
    traceback: str | None = None
    export_uri: str | None = None
    export_sha256: str | None = None


class StopOrdered(BaseFact):
    """Workers are to save what they hold; then the job ends, as a person wanted or with `failure`."""

    fact: Literal["stop_ordered"] = "stop_ordered"
    failure: JobEnded | None = None
