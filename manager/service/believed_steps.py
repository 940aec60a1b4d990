"""Which steps of a report are stored: a VM runs its job's code, and may say anything.

A row of metrics is one step that a generation committed. So it must be of a generation that was opened and
that the VM is a member of, and a step after the one from which that began. If a later generation formed, it
is no step beyond the one from which the later one went on; else none beyond the newest that the VM's workers
say that they committed, or that is journalled. Since a VM may also lie about those, steps are accepted at a
bounded rate, so that a job's rows grow no faster than those of a job that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ...protocol.messages import Report, StepMetrics
from ..core.state import Generation, JobState, vm_of

STEPS_PER_S = 500.0  # of one job, sustained; tiny models on one CPU reach 200
_AT_ONCE = 2000  # beyond that: what agents report together after the manager was away
_NONE = range(1, 1)


@dataclass(slots=True)
class Pace:
    """The newest accepted step of a job, and how many more may be accepted now: a token bucket.

    Time counts since that step was accepted: a job whose steps take long saves up no more than others.
    """

    step: int = 0
    left: float = _AT_ONCE
    at: float | None = None  # seconds; when `left` was true

    def accept(self, step: int, begun_at_step: int, now: float) -> bool:
        """Whether the step, of a generation that began at `begun_at_step`, is accepted now."""
        waited_s = 0.0 if self.at is None else max(0.0, now - self.at)
        # Not capped while nothing new is accepted: after a gap, of rows that a trainer dropped, the next ones
        # are accepted in time.
        self.left, self.at = self.left + STEPS_PER_S * waited_s, now
        num_new = step - max(self.step, begun_at_step)
        if num_new > self.left:
            return False
        if num_new > 0:
            self.left = min(self.left - num_new, _AT_ONCE)
            self.step = step
        return True


def believed(state: JobState, report: Report, pace: Pace, now: float) -> list[StepMetrics]:
    """The rows of the report that are stored. The others are of steps that do not exist."""
    if not report.metrics:
        return []
    committed = _committed(state, report)
    accepted: list[StepMetrics] = []
    for row in report.metrics:
        steps = committed.get(row.generation, _NONE)
        if row.step in steps and pace.accept(row.step, steps.start - 1, now):
            accepted.append(row)
    return accepted


def _committed(state: JobState, report: Report) -> dict[int, range]:
    """For each generation that the report has rows of, the steps that the VM may report."""
    if state.spec is None:
        return {}
    wanted = {row.generation for row in report.metrics}
    found: dict[int, range] = {}
    last, is_superseded = state.spec.training.steps, False
    current = () if state.current is None else (state.current,)
    for generation in chain(current, reversed(state.history)):
        number, formed = generation.number, generation.formed
        if number in wanted and generation.opened_at is not None and _is_member(report.vm, generation):
            # What is not known from a later generation is known from the VM, or from what is journalled.
            known = last if is_superseded else max(state.progress_step, _newest(report, number))
            found[number] = range(1 + (formed.step if formed is not None else 0), 1 + min(last, known))
        wanted.discard(number)
        if not wanted:
            break
        if formed is not None:  # it went on from there: later steps of those before it are lost
            last, is_superseded = min(last, formed.step), True
    return found


def _is_member(vm: str, generation: Generation) -> bool:
    return not generation.members or any(vm_of(worker) == vm for worker, _ in generation.members)


def _newest(report: Report, number: int) -> int:
    """The newest step that workers of the VM say that they committed in this generation; 0: none."""
    return max((w.step for w in (*report.workers, *report.deaths) if w.generation == number), default=0)
