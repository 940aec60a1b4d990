"""The protocol between a joined machine and its manager.

A machine gets a challenge, signs it, and opens one WebSocket. It receives `MachineOrders`, everything that
the machine should do, and sends `MachineReport`s, everything that it does. Lost frames or connections need no
handling, because the next orders and report are complete again.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from .messages import BootConfig, Message

SCHEME = "Makara-Machine"
"""The Authorization header is `Makara-Machine <public key> <nonce> <signature>`; first and last in hex."""
JOIN_HEADER = "Makara-Join-Token"
CONSOLE_BYTES = 8 << 10

LeaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


class Challenge(Message):
    """A challenge; `nonce` is valid once, for a minute."""

    manager: str  # as in `Welcome`
    nonce: str

    def signed(self) -> bytes:
        """The bytes that a machine signs; valid only for this manager and nonce."""
        return f"makara machine\n{self.manager}\n{self.nonce}".encode()


class Lease(Message):
    """A VM that this machine is to run. `name` is never reused."""

    name: LeaseName
    vm: LeaseName
    boot: BootConfig | None = None  # None once the manager knows that the agent was started


class MachineOrders(Message):
    """The machine's complete orders; `version` counts within a connection."""

    version: int
    lease: Lease | None = None


class MachineReport(Message):
    """The machine's state after the orders of version `obeyed` (0: none yet)."""

    obeyed: int = 0
    lease: str | None = None  # the lease whose agent runs
    ended: str | None = None  # the last lease that ended
    console: Annotated[str, Field(max_length=CONSOLE_BYTES)] = ""
    # Why files of an ended VM cannot be removed; until then the machine runs no VM. "": all are removed.
    unwiped: Annotated[str, Field(max_length=500)] = ""
    # It was told to end: it runs no further VM, and leaves after the current one.
    leaving: bool = False
    name: Annotated[str, Field(max_length=200)] = ""  # for people
    num_cpus: int = 0
    memory_bytes: int = 0


def machine_id(public_key: bytes) -> str:
    """A machine's id, a hash of its public key."""
    return hashlib.sha256(public_key).hexdigest()[:16]
