"""When a simulated manager dies: between any two of its effects."""

from __future__ import annotations

import random


class Deaths:
    """When the manager dies: asked at each moment between two effects. `odds` of each, at most `most` times;
    or at the moment of this `number`."""

    def __init__(
        self, rng: random.Random, odds: float = 0.0, most: float = 0, number: int | None = None
    ) -> None:
        self._rng, self._odds, self._most, self._number = rng, odds, most, number
        self.moments = 0
        self.over = False
        self.died: list[tuple[int, str]] = []

    def strikes(self, what: str) -> bool:
        self.moments += 1
        if self._number is not None:
            dies = self.moments == self._number
        else:
            dies = not self.over and len(self.died) < self._most and self._rng.random() < self._odds
        if dies:
            self.died.append((self.moments, what))
        return dies
