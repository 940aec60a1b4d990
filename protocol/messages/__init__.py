"""The wire between a manager and an agent, and between an agent and its trainers.

Both directions are *level-triggered*: an `Orders` message is all that a VM should now be doing, and a
`Report` is all that it now is. Either may be lost, repeated or sent again after a reconnection without
harm; only the newest counts. Everything is JSON; nothing here imports torch. Manager and agents need not be
of one version: `frames` reads what comes from the other.
"""

from __future__ import annotations

from .base import (
    INCARNATIONS,
    KEEPS_STEPS,
    PROTOCOL,
    TRAINER_PROTOCOL,
    CheckpointRef,
    DeviceKind,
    Message,
)
from .boot import METADATA_URL, BootConfig, NoticeFile, NoticeSource, StoreIdentity, TrainerUser, VmEnding
from .connection import TO_AGENT, Credential, Refusal, ReportAck, ToAgent, Welcome
from .orders import GenerationOrder, JobSettings, Member, Orders, StoreConfig, plan_hash
from .recipe import Recipe
from .reports import (
    At,
    Beat,
    Corruption,
    DamagedCheckpoint,
    DeviceInfo,
    Failure,
    Formed,
    KeptContributions,
    Miscount,
    Phase,
    Profile,
    Profiling,
    Progress,
    Report,
    Stacks,
    StepMetrics,
    WorkerReport,
)

__all__ = [
    "At",
    "Beat",
    "BootConfig",
    "CheckpointRef",
    "Credential",
    "DeviceInfo",
    "DeviceKind",
    "Failure",
    "Formed",
    "KeptContributions",
    "Corruption",
    "DamagedCheckpoint",
    "Miscount",
    "GenerationOrder",
    "INCARNATIONS",
    "JobSettings",
    "METADATA_URL",
    "Member",
    "Message",
    "NoticeFile",
    "NoticeSource",
    "Orders",
    "PROTOCOL",
    "Phase",
    "Profile",
    "Profiling",
    "Progress",
    "Recipe",
    "Refusal",
    "Report",
    "ReportAck",
    "Stacks",
    "StepMetrics",
    "StoreConfig",
    "StoreIdentity",
    "TO_AGENT",
    "KEEPS_STEPS",
    "TRAINER_PROTOCOL",
    "ToAgent",
    "TrainerUser",
    "VmEnding",
    "Welcome",
    "WorkerReport",
    "plan_hash",
]
