"""Operations, written as PyTorch's pipeline schedules write them (`2F5`), plus `R` for recompute."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a worker does for one micro-batch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"

    __hash__ = str.__hash__  # an enum's own is Python code, and dictionaries are keyed by kinds


class Operation(NamedTuple):
    """One operation; `stage` is the index of the hop on the micro-batch's path."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """`"2F5"` -> stage 2, forward, micro-batch 5. Raises `ValueError` that shows the text."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"operation {text!r}: expected <stage><F|B|I|W|R><micro-batch>, for example 2F5")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


_PATTERN = re.compile(r"(\d+)([FBIWR])(\d+)")
