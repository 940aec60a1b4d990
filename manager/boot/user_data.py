"""User data of a worker's VM: a pure function of an attempt, its boot file, and what the manager serves."""

from __future__ import annotations

from pathlib import Path

from ...protocol.messages import BootConfig
from ..spec.placement import Attempt
from .cloud_config import BOOT_FILE, EndTimer, cloud_config
from .payload import Payload, payload

JOIN_WITHIN_S = 1800

_STATE = "/var/lib/makara"
_END = EndTimer(
    name="makara-join-timeout",
    unless=f"test -s {_STATE}/worker.token",  # which a VM has once it has joined
    after_s=JOIN_WITHIN_S,
    delete_for_s=240,
)


def render(attempt: Attempt, boot: BootConfig) -> bytes:
    """The user data for VMs with this installation, for providers. Raises `TooLarge`."""
    return user_data(attempt, boot, payload())


def user_data(attempt: Attempt, boot: BootConfig, payload: Payload) -> bytes:
    """The user data; the same bytes for the same attempt. Raises `TooLarge`."""
    there = boot.model_copy(update={"vm": attempt.vm, "directory": _STATE})
    script = Path(__file__).with_name("first_boot.py").read_text()
    return cloud_config(
        attempt.name,
        folder="/etc/makara",
        programs={
            BOOT_FILE: there.model_dump_json(),
            "payload.json": payload.to_json(),
            "first_boot.py": script,
        },
        unit="makara-agent.service",
        timers=[_END],
    )
