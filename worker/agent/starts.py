"""Counts the starts of an agent on this VM: a reboot starts it again.

Its reports and trainers are numbered above those of earlier agents, so that the manager does not confuse
them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...protocol.messages import INCARNATIONS, Failure, Phase, WorkerReport

log = logging.getLogger("makara.agent")

REPORTS = 10**9  # numbers reserved for one agent: thirty reports a second for a year
_FILE = "agent.starts"  # with a byte for each start


def count_start(directory: Path) -> int:
    """Count this start; returns how many agents were started before."""
    path = directory / _FILE
    try:
        with path.open("ab") as file:
            earlier = file.tell()
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk: harmless unless this VM reboots
        log.warning("cannot write to %s that this VM's agent began: %s", path, error)
        return path.stat().st_size if path.exists() else 0
    return earlier


def last_of(worker: str, earlier: int) -> WorkerReport:
    """The death of the trainer that ran when this VM went down, with the largest number that it can have."""
    failure = Failure(kind="killed", message="its VM was started anew")
    number = earlier * INCARNATIONS - 1
    return WorkerReport(worker=worker, incarnation=number, phase=Phase.EXITED, failure=failure)
