"""User data for cloud-init: a pure function of an attempt, its boot file, and what the manager serves."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import yaml

from ...protocol.messages import BootConfig
from ..providers import NotAllowed
from ..spec.placement import Attempt
from .payload import Payload, payload

MOST_BYTES = 16_384  # of AWS, before base64
JOIN_WITHIN_S = 1800
_END_S = 300  # for what a VM does to end itself

_ETC = "/etc/makara"
_STATE = "/var/lib/makara"
_UNIT = "makara-agent.service"


class TooLarge(NotAllowed):
    """No cloud would take it."""


def render(attempt: Attempt, boot: BootConfig) -> bytes:
    """What providers are given: user data for VMs of what is installed here. Raises `TooLarge`."""
    return user_data(attempt, boot, payload())


def user_data(attempt: Attempt, boot: BootConfig, payload: Payload) -> bytes:
    """For one attempt always the same bytes. Raises `TooLarge`."""
    there = boot.model_copy(update={"vm": attempt.vm, "directory": _STATE})
    script = Path(__file__).with_name("first_boot.py").read_text()
    unit = (files("makara.deploy") / _UNIT).read_text()
    config = {
        "bootcmd": [_end_unless_joined()],
        "write_files": [
            _file(f"{_ETC}/boot.json", there.model_dump_json(), "0600"),
            _file(f"{_ETC}/payload.json", payload.to_json(), "0644"),
            _file(f"{_ETC}/first_boot.py", script, "0644"),
            _file(f"/etc/systemd/system/{_UNIT}", unit, "0644"),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", _UNIT],
            ["systemctl", "start", "--no-block", _UNIT],
        ],
    }
    text = "#cloud-config\n" + yaml.safe_dump(config, sort_keys=False, width=1000)
    if len(text.encode()) > MOST_BYTES:
        raise TooLarge(f"user data of {attempt.name}: {len(text.encode())} bytes, {MOST_BYTES} are allowed")
    return text.encode()


def _end_unless_joined() -> list[str]:
    """The first thing that the VM does: whatever fails later, it does not stay and bill. On Azure, where one
    that is only shut down is billed on, it has itself deleted.

    A VM that has joined has a token of its own in its folder.
    """
    # Whatever that script does, or if it is not there, the VM is powered off a little later.
    end = f"timeout {_END_S} python3 {_ETC}/first_boot.py --end; systemctl poweroff --force"
    end = f"test -s {_STATE}/worker.token || {{ {end}; }}"
    # A timer starts after sysinit.target, which waits for this very command.
    timer = ["systemd-run", "--no-block", "--unit=makara-join-timeout", f"--on-active={JOIN_WITHIN_S}"]
    return [*timer, "/bin/sh", "-c", end]


def _file(path: str, content: str, permissions: str) -> dict[str, str]:
    return {"path": path, "permissions": permissions, "content": content}
