"""User data for the VM of a manager: the program that waits for `makara up`, and by what it knows it."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from pathlib import Path

import yaml

from ...protocol.messages import VmEnding
from ..boot.user_data import MOST_BYTES, TooLarge
from .record import PAIR_WITHIN_S, Record

FOLDER = "/etc/makara-manager"
_UNIT = "makara-manager-boot.service"
_POWER_OFF = ["systemctl", "poweroff", "--force"]
_MARGIN_S = 900  # for cloud-init to come so far
INSTALLED_WITHIN_S = 4500  # after a boot; `makara up` waits for less than that
_END_WITHIN_S = 900
# A manager that runs is not ended because a mark of it could not be written.
_RUNS = f"test -e {FOLDER}/installed || systemctl is-active --quiet makara-manager.service"


def user_data(record: Record, ending: VmEnding) -> bytes:
    """`ending`: how the VM ends if nobody came. Raises `TooLarge`."""
    boot = {
        "host": "0.0.0.0",
        "port": record.port,
        "secret": record.secret,
        "pair_within_s": PAIR_WITHIN_S,
        "payload_sha256": record.payload_sha256,
        "ending": {
            name: getattr(ending, name) for name in ("kind", "metadata_url", "management_url", "identity_id")
        },
        "power_off": _POWER_OFF,
    }
    program = Path(__file__).with_name("manager_boot.py").read_text()
    config = {
        "bootcmd": [
            _end_unless("paired", f"test -e {FOLDER}/paired", int(PAIR_WITHIN_S) + _MARGIN_S),
            _end_unless("installed", _RUNS, INSTALLED_WITHIN_S),
        ],
        "write_files": [
            _file(f"{FOLDER}/boot.json", json.dumps(boot)),
            _file(f"{FOLDER}/manager_boot.py", program),
            _file(f"/etc/systemd/system/{_UNIT}", (files("makara.deploy") / _UNIT).read_text()),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", _UNIT],
            ["systemctl", "start", "--no-block", _UNIT],
        ],
    }
    text = "#cloud-config\n" + yaml.safe_dump(config, sort_keys=False, width=1000)
    if len(text.encode()) > MOST_BYTES:
        raise TooLarge(f"user data of the manager's VM: {len(text)} bytes, {MOST_BYTES} are allowed")
    return text.encode()


def _end_unless(name: str, test: str, after_s: int) -> list[str]:
    """The first thing that the VM does at each boot: whatever fails later, it does not stay and bill."""
    ended = f"timeout {_END_WITHIN_S} python3 {FOLDER}/manager_boot.py {FOLDER} --end"
    # A timer starts after sysinit.target, which waits for this very command.
    timer = ["systemd-run", "--no-block", f"--unit=makara-up-{name}", f"--on-active={after_s}"]
    return [*timer, "/bin/sh", "-c", f"{test} || {ended} || {' '.join(_POWER_OFF)}"]


def _file(path: str, content: str) -> dict[str, str]:
    packed = base64.b64encode(gzip.compress(content.encode(), mtime=0)).decode()
    return {"path": path, "permissions": "0600", "encoding": "gz+b64", "content": packed}
