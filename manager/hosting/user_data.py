"""User data for the VM of a manager: the program that waits for `makara up`, and the shared secret."""

from __future__ import annotations

import json
from pathlib import Path

from ...protocol.messages import VmEnding
from ..boot.cloud_config import BOOT_FILE, EndTimer, cloud_config
from .record import PAIR_WITHIN_S, VmRecord

FOLDER = "/etc/makara-manager"
_MARGIN_S = 900  # until cloud-init starts that program
INSTALLED_WITHIN_S = 4500  # after a boot; `makara up` waits for less than that
_DELETE_FOR_S = 600
_TIMERS = (
    EndTimer(
        name="makara-up-paired",
        unless=f"test -e {FOLDER}/paired",
        after_s=int(PAIR_WITHIN_S) + _MARGIN_S,
        delete_for_s=_DELETE_FOR_S,
    ),
    EndTimer(
        name="makara-up-installed",
        # A running manager must not be ended because its mark could not be written.
        unless=f"test -e {FOLDER}/installed || systemctl is-active --quiet makara-manager.service",
        after_s=INSTALLED_WITHIN_S,
        delete_for_s=_DELETE_FOR_S,
    ),
)


def user_data(record: VmRecord, ending: VmEnding) -> bytes:
    """The user data. `ending`: how the VM ends if `makara up` does not connect. Raises `TooLarge`."""
    boot = {
        "host": "0.0.0.0",
        "port": record.port,
        "secret": record.secret,
        "pair_within_s": PAIR_WITHIN_S,
        "payload_sha256": record.payload_sha256,
        "ending": ending.model_dump(),
        "delete_for_s": _DELETE_FOR_S,
    }
    program = Path(__file__).with_name("manager_boot.py").read_text()
    return cloud_config(
        "the manager's VM",
        folder=FOLDER,
        programs={BOOT_FILE: json.dumps(boot), "manager_boot.py": program},
        unit="makara-manager-boot.service",
        timers=_TIMERS,
    )
