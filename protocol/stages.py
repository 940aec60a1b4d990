"""How a process names what it does now on its stderr, for the command that waits for it."""

from __future__ import annotations

import sys

STAGE = "makara-stage: "
"""Such a line begins so; all other lines are those of the user's code."""


def stage(text: str) -> None:
    """Say that a part of the work begins, to the command that started this process and waits for it."""
    print(f"{STAGE}{text}", file=sys.__stderr__, flush=True)
