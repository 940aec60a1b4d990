"""The members of one generation in a replay: they form, step, save, hold, or lose a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...pipeline import Plan, Range
from ...simulator import to_ns
from ..core.state import Generation
from ..spec.job_spec import CheckpointSpec
from ..world import Beginning, Trainer
from .loading import Bytes
from .steady_run import SteadyRun
from .step_in_flight import Continued


class GroupPhase(StrEnum):
    """What the members of a generation are at, all together."""

    FORMING = "forming"
    STEPPING = "stepping"
    SAVING = "saving"  # the last checkpoint, or the one before a hold
    RESTING = "resting"  # held, or finished
    BROKEN = "broken"  # a member is gone


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    """One generation. `members` are its trainers, those of the plan first, in rank order."""

    number: int
    members: Sequence[Trainer]
    ranges: Sequence[Range]
    shape: str
    predicted_s: float
    doing: GroupPhase
    beginning: Beginning
    plan: Plan
    continued: Continued | None = None
    """The step that it goes on with, which another generation has begun."""
    rest_s: float = 0.0
    """What is left of that step takes so long."""
    stretch: SteadyRun | None = None
    holding: bool = False

    @property
    def workers(self) -> Sequence[Trainer]:
        return self.members[: len(self.ranges)]

    @property
    def stages(self) -> Sequence[Range]:
        return sorted(set(self.ranges))

    @property
    def replicas(self) -> int:
        """The number of hosts of the stage that has fewest."""
        return min(map(self.ranges.count, self.stages))

    def step_at(self, now_ns: int) -> int:
        """Steps committed by now, while it steps."""
        if self.stretch is None:
            return self.beginning.step
        return self.stretch.first_step + self.stretch.steps_at(now_ns)

    def published_at(self, now_ns: int) -> int | None:
        """The step of its newest checkpoint by now."""
        if self.stretch is None:
            return None
        steps = self.stretch.newest_published(now_ns)
        return None if steps is None else self.stretch.first_step + steps


def make_group(
    generation: Generation, members: Sequence[Trainer], beginning: Beginning, doing: GroupPhase
) -> Group:
    """The group of an opened generation."""
    plan = Plan.from_json(generation.plan)
    assert generation.predicted_s is not None, "the planner tells the time of what it plans"
    return Group(
        number=generation.number,
        members=members,
        ranges=plan.ranges,
        shape=generation.shape,
        predicted_s=generation.predicted_s,
        doing=doing,
        beginning=beginning,
        plan=plan,
    )


def make_stretch(
    group: Group, bytes_of: Bytes, checkpoint: CheckpointSpec, now_ns: int, *, published: int, saved_ns: int
) -> SteadyRun:
    """The steps of a group that has just formed. `published`: step of the newest checkpoint; `saved_ns`: when
    it was taken, from which a period of checkpoints counts (`worker/trainer/generation.py`).
    """
    step, step_ns = group.beginning.step, max(1, to_ns(group.predicted_s))
    ahead_ns = 0
    if group.continued is not None:
        ahead_ns = step_ns - max(1, to_ns(group.rest_s))
    stall_ns = to_ns(bytes_of.snapshot_s(group.stages, group.replicas))
    interval, period_s = checkpoint.interval_steps, checkpoint.interval_s
    if interval is not None:
        first, every, at_once = interval - step % interval, interval, step - published >= interval
    else:
        period_ns = to_ns(period_s or 0.0)
        first = max(1, (period_ns - (now_ns - saved_ns) + ahead_ns) // step_ns + 1)
        every, at_once = max(1, (period_ns - stall_ns) // step_ns + 1), False
    return SteadyRun(
        began_ns=now_ns,
        first_step=step,
        step_ns=step_ns,
        first=first,
        every=every,
        stall_ns=stall_ns,
        publish_ns=to_ns(bytes_of.publish_s(group.stages, group.replicas)),
        at_once=at_once,
        ahead_ns=ahead_ns,
    )
