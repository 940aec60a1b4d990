"""What all messages have, and the numbers of the protocols."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from ..bounds import Count
from ..unknown_values import or_else

# Raised when an older side would misread what a newer one says. New fields and frames need no new number:
# they have defaults, and are passed over where they are not known.
PROTOCOL = 2  # a plan is sent to one VM of its generation
# Raised when trainers of two versions could not form a generation, or train in it, together: what they say to
# each other, and in which order, is no matter of the manager's.
TRAINER_PROTOCOL = 13  # rank 0 gives the others plan and members
KEEPS_STEPS = 5  # the first protocol whose trainers keep what they have of a step over generations


DeviceKind = Annotated[Literal["cpu", "cuda", "other"], or_else("other")]
"""Other: of a kind that this version does not know, and cannot plan for."""


# Of one worker slot, for each agent that its VM has: a reboot starts another.
INCARNATIONS = 10_000


class Message(BaseModel):
    """Strict and immutable: an unknown key or a wrong type is an error, never ignored."""

    # A loss may be no number; as JSON it must come back as what it was.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class CheckpointRef(Message):
    """A checkpoint: the state after commit `step`, written by `generation`."""

    step: Count
    generation: Count

    def __str__(self) -> str:
        return f"{self.step}-g{self.generation}"

    @property
    def age_rank(self) -> tuple[int, int]:
        """Sorts by age: a later generation is newer, even if it went back some steps."""
        return (self.generation, self.step)

    @classmethod
    def parse(cls, text: str) -> CheckpointRef:
        """Parse what `str` wrote. Raises `ValueError`."""
        match = _NAME.fullmatch(text)
        parsed = cls(step=int(match[1]), generation=int(match[2])) if match else None
        if parsed is None or str(parsed) != text:  # one spelling each: no leading zeros, no foreign digits
            raise ValueError(f"checkpoint {text!r}: expected <step>-g<generation>")
        return parsed


_NAME = re.compile(r"(\d+)-g(\d+)")
