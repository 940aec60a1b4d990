"""The providers of one manager: this machine, and each cloud that its settings name."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.messages import BootConfig
from ..config import ServerConfig
from ..spec.placement import Attempt
from . import NotAllowed, Provider
from .local import LocalProvider
from .settings import read_settings

Render = Callable[[Attempt, BootConfig], bytes]
"""The user data with which the VM of an attempt boots: for one attempt always the same bytes."""


def open_providers(config: ServerConfig, identity: str, render: Render) -> dict[str, Provider]:
    """By the name that a job file gives them. `identity` tags whatever a cloud creates for this manager.

    A cloud's library is imported only if the settings name that cloud. Raises `ConfigError`.
    """
    read_settings(config.home)
    return {"local": LocalProvider(config.home / "vms", command=config.agent_command)}


def no_boot(attempt: Attempt, boot: BootConfig) -> bytes:
    """Raises `NotAllowed`: VMs that begin as a bare machine are not booted by this version."""
    raise NotAllowed(f"{attempt.placement.provider}: this version cannot boot a VM of a cloud into a worker")
