"""Views of a job's committed steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from pydantic import BaseModel

from ....protocol.messages import StepMetrics
from ...core.state import JobState
from ..runtime import Job


class StepView(BaseModel):
    """One committed step. In JSON null stands for NaN and infinities."""

    step: int
    generation: int
    loss: float | None
    grad_norm: float | None
    seconds: float
    samples: int
    loss_scale: float | None  # fp16 only
    skipped: bool  # its gradient overflowed in fp16: nothing was updated


def step_view(metrics: StepMetrics) -> StepView:
    return StepView.model_validate(metrics, from_attributes=True)


def measured_s(job: Job) -> float | None:
    """Mean seconds of the newest generation's last steps, without its first one if there are others: that may
    be the rest of a step, or have run twice."""
    newest = job.recent[-1].generation if job.recent else None
    seconds = [metrics.seconds for metrics in job.recent if metrics.generation == newest]
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted) if counted else None


def newest_step(state: JobState, last: StepMetrics | None) -> int:
    """The newest step of the job's current history; steps that are being repeated do not count."""
    number, step = max(_beginnings(state), default=(0, 0))
    steps = [step] + [c.step for c in state.published if c.generation >= number]
    if last is not None and last.generation >= number:
        steps.append(last.step)
    return max(steps)


def surviving(state: JobState, rows: Iterable[StepMetrics]) -> list[StepMetrics]:
    """The rows without steps that were lost because a later generation began at an earlier step."""
    beginnings = sorted(_beginnings(state))
    numbers = [number for number, _ in beginnings]
    # For each generation, the first step of it and all later ones: earlier rows beyond that are lost.
    left = list(accumulate((step for _, step in reversed(beginnings)), min))[::-1]
    places = ((row, bisect_right(numbers, row.generation)) for row in rows)
    return [row for row, place in places if place == len(left) or row.step <= left[place]]


def _beginnings(state: JobState) -> list[tuple[int, int]]:
    """(number, first step) of each generation that formed."""
    present = [g for g in (state.current, state.planned) if g is not None]
    return [(g.number, g.formed.step) for g in (*state.history, *present) if g.formed is not None]
