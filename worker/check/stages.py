"""Says on stderr what the check does now, for the command that waits for it."""

from __future__ import annotations

import sys

from ...protocol.stages import STAGE


def stage(text: str) -> None:
    """Say that a part of the check begins."""
    print(f"{STAGE}{text}", file=sys.__stderr__, flush=True)
