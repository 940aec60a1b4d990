"""User data for cloud-init, common to all VMs: timers that end the VM, then files, then a systemd unit."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import yaml

from ..providers import NotAllowed

MOST_BYTES = 16_384  # AWS's limit, before base64
END_PROGRAM = "end_vm.py"
BOOT_FILE = "boot.json"
_END_MARGIN_S = 60  # for the last requests of a deletion
_LEVEL = 9  # of gzip; fixed, so that an attempt always has the same bytes


class TooLarge(NotAllowed):
    """The user data is larger than clouds accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTimer:
    """A timer that ends the VM some time after each boot."""

    name: str  # of its unit
    unless: str  # a shell command that succeeds on a VM that is to stay
    after_s: int
    delete_for_s: int  # how long a VM on Azure then tries to delete itself


def cloud_config(
    of: str, *, folder: str, programs: Mapping[str, str], unit: str, timers: Sequence[EndTimer]
) -> bytes:
    """The user data. `of`: its VM, for errors. `programs`: {name: content} of files in `folder`, readable by
    root only; one is `BOOT_FILE`, which says how the VM ends. `unit`: the file of `deploy/` to start.

    Compressed; equal contents give equal bytes. Raises `TooLarge`.
    """
    end = Path(__file__).with_name(END_PROGRAM).read_text()
    config = {
        "bootcmd": [_end_unless(timer, folder) for timer in timers],
        "write_files": [
            *(_file(f"{folder}/{name}", text, "0600") for name, text in programs.items()),
            _file(f"{folder}/{END_PROGRAM}", end, "0600"),
            _file(f"/etc/systemd/system/{unit}", (files("makara.deploy") / unit).read_text(), "0644"),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", unit],
            ["systemctl", "start", "--no-block", unit],
        ],
    }
    data = f"#cloud-config\n{yaml.safe_dump(config, sort_keys=False, width=1000)}".encode()
    if len(data) > MOST_BYTES:
        raise TooLarge(f"user data of {of}: {len(data)} bytes, {MOST_BYTES} are allowed")
    return data


def _end_unless(timer: EndTimer, folder: str) -> list[str]:
    """The command that arms the timer, first at each boot, so that no later failure leaves a billed VM."""
    end = f"timeout {timer.delete_for_s + _END_MARGIN_S} python3 {folder}/{END_PROGRAM} {folder}/{BOOT_FILE}"
    # If that program is missing or fails, the VM is powered off all the same.
    shell = f"{timer.unless} || {end} {timer.delete_for_s} || systemctl poweroff --force"
    # A timer starts after sysinit.target, which waits for this very command.
    run = ["systemd-run", "--no-block", f"--unit={timer.name}", f"--on-active={timer.after_s}"]
    return [*run, "/bin/sh", "-c", shell]


def _file(path: str, content: str, permissions: str) -> dict[str, str]:
    packed = base64.b64encode(gzip.compress(content.encode(), _LEVEL, mtime=0)).decode()
    return {"path": path, "permissions": permissions, "encoding": "gz+b64", "content": packed}
