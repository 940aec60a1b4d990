"""How failures are counted: those that come together are one, and progress makes up for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

_ROUND_S = 10.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Failures counted in rounds: different workers that fail within seconds, in one generation, are one."""

    count: int = 0
    began_at: float = 0.0
    generation: int = -1
    incarnations: frozenset[tuple[str, int]] = frozenset()

    def failed(self, at: float, generation: int, worker: str, incarnation: int) -> Rounds:
        death = (worker, incarnation)
        together = generation == self.generation and 0 <= at - self.began_at < _ROUND_S
        if together and all(worker != other for other, _ in self.incarnations):
            return replace(self, incarnations=self.incarnations | {death})
        return Rounds(self.count + 1, at, generation, frozenset({death}))
