"""Where a simulated generation begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...morphing import Rung, agree
from ...protocol.messages import CheckpointRef
from .machines import Trainer


@dataclass(frozen=True, slots=True)
class Beginning:
    """The rung of the ladder, and the committed steps that the members go on from."""

    rung: Rung
    step: int
    branch: int
    """The generation whose commit went into that state last, or that published it."""
    kept: frozenset[str]
    """Workers that hold it; rung peers alone."""


def begin(members: Sequence[Trainer], checkpoints: Sequence[CheckpointRef], num_sections: int) -> Beginning:
    """What members that form a generation agree on, by the rule that trainers go by (`morphing.agree`). Those
    that saw no commit apply it by the record of who did; without a state that all can go on with, they read
    the newest of `checkpoints`.
    """
    found = agree(
        [trainer.standing() for trainer in members], num_sections=num_sections, checkpoints=checkpoints
    )
    for application in found.apply:
        assert found.record is not None, "only a commit is applied"
        members[application.member].commit(found.record.generation)
    if found.step is not None:
        kept = frozenset(members[member].worker for member in found.keep)
        return Beginning(found.rung, found.step, found.branch, kept)
    if not checkpoints:
        return Beginning(found.rung, 0, 0, frozenset())
    return Beginning(found.rung, checkpoints[0].step, checkpoints[0].generation, frozenset())
