"""How often an agent was started on this VM: a reboot starts it again, and what ran before runs no more.

Its reports and trainers are numbered above those of the agents before it, so that the manager takes them for
none of those.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...protocol.messages import INCARNATIONS, Failure, Phase, WorkerReport

log = logging.getLogger("makara.agent")

REPORTS = 10**9  # of one agent: as many as thirty a second are in a year
_FILE = "agent.starts"  # a byte for each


def count_start(directory: Path) -> int:
    """How many agents began on this VM before the one that begins now."""
    path = directory / _FILE
    try:
        with path.open("ab") as file:
            earlier = file.tell()
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk: nothing follows, unless this VM reboots
        log.warning("cannot write to %s that this VM's agent began: %s", path, error)
        return path.stat().st_size if path.exists() else 0
    return earlier


def last_of(worker: str, earlier: int) -> WorkerReport:
    """The end of the trainer that ran when this VM went down, under the last number that it can have had."""
    failure = Failure(kind="killed", message="its VM was started anew")
    number = earlier * INCARNATIONS - 1
    return WorkerReport(worker=worker, incarnation=number, phase=Phase.EXITED, failure=failure)
