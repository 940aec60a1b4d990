"""What a VM is born with, and how it learns of its end and makes it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Message

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
    management_url: str = "https://management.azure.com"  # and, with a slash, whom its tokens are for
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
