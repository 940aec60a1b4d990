"""Operations, written as PyTorch's pipeline schedules write them (`2F5`), plus `R` for recompute."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a worker does for one micro-batch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"


class Operation(NamedTuple):
    """One operation; `stage` is the index of the hop on the micro-batch's path."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"
