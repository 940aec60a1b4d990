"""How a process names what it does now on its stderr, for the command that waits for it."""

STAGE = "makara-stage: "
"""Such a line begins so; all other lines are those of the user's code."""
