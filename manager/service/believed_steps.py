"""Which steps of a report are stored: a VM runs its job's code, and may say anything.

A row of metrics is one step that a generation committed. So it must be of a generation that the VM is a
member of, be no step beyond the job's last one, and, in the generation that runs, none that the VM's own
workers have not committed. Since a VM may also lie about those, steps are accepted at a bounded rate, so that
a job's rows grow no faster than those of a job that trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.messages import Report, StepMetrics
from ..core.state import Generation, JobState, vm_of

STEPS_PER_S = 500.0  # of one job, sustained; tiny models on one CPU reach 200
_AT_ONCE = 2000  # beyond that: what agents report together after the manager was away


@dataclass(slots=True)
class Pace:
    """The newest accepted step of a job, and how many more may be accepted now: a token bucket."""

    step: int = 0
    left: float = _AT_ONCE
    at: float | None = None  # seconds; when `left` was true

    def accept(self, step: int, begun_at_step: int, now: float) -> bool:
        """Whether the step, of a generation that began at `begun_at_step`, is accepted now."""
        waited_s = 0.0 if self.at is None else max(0.0, now - self.at)
        # Not capped: after a gap, of rows that a trainer dropped, the next ones are accepted in time.
        self.left, self.at = self.left + STEPS_PER_S * waited_s, now
        num_new = step - max(self.step, begun_at_step)
        if num_new > self.left:
            return False
        if num_new > 0:
            self.left -= num_new
            self.step = step
        return True


def believed(state: JobState, report: Report, pace: Pace, now: float) -> list[StepMetrics]:
    """The rows of the report that are stored. The others are of steps that do not exist."""
    present = (generation for generation in (state.current, state.planned) if generation is not None)
    generations = {generation.number: generation for generation in (*state.history, *present)}
    accepted: list[StepMetrics] = []
    for row in report.metrics:
        generation = generations.get(row.generation)
        if generation is None or not _may_report(state, report, generation, row.step):
            continue
        begun_at_step = generation.formed.step if generation.formed is not None else 0
        if pace.accept(row.step, begun_at_step, now):
            accepted.append(row)
    return accepted


def _may_report(state: JobState, report: Report, generation: Generation, step: int) -> bool:
    if state.spec is None or step > state.spec.training.steps:
        return False
    if generation.members and report.vm not in {vm_of(worker) for worker, _ in generation.members}:
        return False
    if generation is not state.current:
        return True  # a closed one, whose trainers may be gone
    committed = [w.step for w in (*report.workers, *report.deaths) if w.generation == generation.number]
    return step <= max(committed, default=-1)
