"""Operations, written as PyTorch's pipeline schedules write them (`2F5`), plus `R` for recompute.

A backward is one operation, `B`, or two: `I`, the gradients of a stage's inputs, for which the stage before
waits, and later `W`, the gradients of its parameters, for which nobody does (SlipStream section 3.2).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a worker does for one micro-batch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"
    INPUT = "I"
    WEIGHT = "W"


class Operation(NamedTuple):
    """One operation; `stage` is the index of the hop on the micro-batch's path."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"
