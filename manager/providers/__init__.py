"""Providers: where VMs come from. In go the core's commands to request and release; out come VMs that boot
into an agent (`BootConfig`), and word of those that are gone.

A provider holds no decision and no memory that matters: every VM carries its own name as a tag, so that a
manager that lost everything but its journal finds each VM again. `request` and `release` are idempotent.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Protocol

from ...protocol.messages import BootConfig


class VmStatus(StrEnum):
    """What the provider knows of a VM."""

    RUNNING = "running"
    GONE = "gone"  # authoritative: it was here and has ended


class ProviderError(Exception):
    """The provider could not do it; the message says why in its words."""


class NoCapacity(ProviderError):
    """None to be had now; the same request may succeed later."""


class Provider(Protocol):
    """Blocking calls, run off the event loop; safe to use from several threads."""

    def request(self, boot: BootConfig) -> None:
        """Have VM `boot.vm` exist, or do nothing if it does. Raises `ProviderError`, `NoCapacity`."""
        ...

    def release(self, vm: str) -> None:
        """Have VM `vm` not exist, or do nothing if it does not. Raises `ProviderError`."""
        ...

    def list(self) -> dict[str, VmStatus]:
        """Every VM with this manager's tag. Raises `ProviderError`."""
        ...


FaultKind = Literal["kill", "notice", "stop", "continue"]


class FaultInjector(Protocol):
    """What the demo and the tests do to VMs; only the local provider offers it."""

    def inject(self, vm: str, kind: FaultKind, deadline_s: float = 0.0) -> None:
        """`kill`: the whole VM at once. `notice`: word of a kill `deadline_s` from now, and then the kill.
        `stop`/`continue`: its trainers hang and wake (SIGSTOP, SIGCONT). Raises `ProviderError`."""
        ...


__all__ = ["FaultInjector", "FaultKind", "NoCapacity", "Provider", "ProviderError", "VmStatus"]
