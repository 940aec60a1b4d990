"""What a machine of a person's own and its manager say to each other.

A machine asks for a challenge, signs it, and opens one WebSocket. On it come `MachineOrders`: all that the
machine should be doing; back go `MachineReport`s: all that it does. Losing frames or the connection needs no
treatment: the next orders and the next report say everything again.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from .messages import BootConfig, Message

SCHEME = "Makara-Machine"
"""Of the Authorization header: `Makara-Machine <public key> <nonce> <signature>`; first and last in hex."""
JOIN_HEADER = "Makara-Join-Token"
CONSOLE_BYTES = 8 << 10

LeaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


class Challenge(Message):
    """`nonce` is good once, and for a minute."""

    manager: str  # as in `Welcome`
    nonce: str

    def signed(self) -> bytes:
        """What a machine signs: good for this manager and this nonce alone."""
        return f"makara machine\n{self.manager}\n{self.nonce}".encode()


class Lease(Message):
    """One VM that this machine is to be. `name` is never used for another."""

    name: LeaseName
    vm: LeaseName
    boot: BootConfig | None = None  # None: the manager knows that its agent was started


class MachineOrders(Message):
    """`version` counts within a connection."""

    version: int
    lease: Lease | None = None


class MachineReport(Message):
    """What the machine is after it obeyed the orders of version `obeyed`; 0: it has had none."""

    obeyed: int = 0
    lease: str | None = None  # whose agent runs
    ended: str | None = None  # the last lease of which nothing runs
    console: Annotated[str, Field(max_length=CONSOLE_BYTES)] = ""
    # Why something of a VM that ended cannot be wiped: until it is, this machine is no VM. "": it is.
    unwiped: Annotated[str, Field(max_length=500)] = ""
    # It was told to end: it becomes no other VM, and goes once it is none.
    leaving: bool = False
    name: Annotated[str, Field(max_length=200)] = ""  # for people
    num_cpus: int = 0
    memory_bytes: int = 0


def machine_id(public_key: bytes) -> str:
    """The name of a machine: what it signs with, and nothing else."""
    return hashlib.sha256(public_key).hexdigest()[:16]
