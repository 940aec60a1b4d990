"""Dynamic loss scaling for fp16: a power of two on the loss, so that small gradients do not vanish.

Like `torch.amp.GradScaler`: the scale doubles after 2000 steps without overflow and halves after an overflow,
and a step that overflows updates nothing. It is part of every section's state, and changes only with commits,
so all workers have the same one. Since it is a power of two, dividing by it does not round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000  # GradScaler's default
_LEAST = 2.0**-24  # fp16's smallest number: a smaller scale cannot prevent an overflow


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of the next step, and the number of consecutive steps without overflow."""

    scale: float = INITIAL
    good_steps: int = 0

    def __post_init__(self) -> None:
        mantissa, _ = math.frexp(self.scale)
        if not (mantissa == 0.5 and self.good_steps >= 0):
            raise ValueError(f"loss scale: {self.scale!r} is no power of two, or {self.good_steps} < 0")

    def after(self, overflow: bool) -> LossScale:
        """The loss scale after a step."""
        if overflow:
            return LossScale(self.scale / 2)
        if self.good_steps + 1 == GROWTH_INTERVAL:
            return LossScale(self.scale * 2)
        return LossScale(self.scale, self.good_steps + 1)

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale could not prevent another overflow."""
        return self.scale <= _LEAST
