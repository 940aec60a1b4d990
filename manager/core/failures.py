"""How failures are counted: those that come together are one, and progress makes up for them."""

from __future__ import annotations

from collections.abc import Iterable
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


@dataclass(frozen=True, slots=True)
class Death:
    """A trainer that a signal or its lease ended, on a VM that had no notice."""

    vm: str
    worker: str
    incarnation: int
    at: float
    generation: int  # the newest one at that time
    progress_step: int  # of the job at that time
    message: str
    closed: bool = False  # it did not leave a closed generation, perhaps for its peers' sake


def num_rounds(deaths: Iterable[Death]) -> int:
    """How many times something died."""
    rounds = Rounds()
    for death in deaths:
        rounds = rounds.failed(death.at, death.generation, death.worker, death.incarnation)
    return rounds.count


def on_vm(deaths: Iterable[Death], vm: str) -> list[Death]:
    """Those on one VM since one of its workers last committed a step."""
    return [death for death in deaths if death.vm == vm]


def without_progress(deaths: Iterable[Death], progress_step: int) -> list[Death]:
    """Those since the job last committed a step, for which their own generation is to blame."""
    return [death for death in deaths if death.progress_step >= progress_step and not death.closed]
