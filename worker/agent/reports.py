"""Makes an agent's report fit into one frame.

Deaths of trainers and metrics are kept until they are acknowledged, and sent again on the next connection.
After a long absence there may be many: they are sent in pieces, the oldest first. If a report is too large
for the frame, stacks are shortened or left out, then metrics and deaths wait for a later report. A worker
whose own part does not fit, or cannot be written as JSON, is reported as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...protocol.bounds import MOST_DEATHS, MOST_METRICS
from ...protocol.messages import Beat, Failure, Phase, Report, Stacks, StepMetrics, WorkerReport

T = TypeVar("T")

_METRICS_BYTES = 512  # upper bound for one step as JSON
_DEATH_BYTES = 1 << 12  # typical bound for one death as JSON; if one is larger, others wait
_LEAST_STACKS_CHARS = 1024  # a shorter part of a trainer's stacks would be useless


class Backlog(Generic[T]):
    """Unacknowledged items, oldest first, with the number of the report that first carried each.

    `most`: the most items in one report, each of at most `item_bytes` as JSON. `kept`: the most items
    in all; the oldest beyond are dropped.
    """

    def __init__(self, most: int, item_bytes: int, *, kept: int | None = None) -> None:
        self._most, self._item_bytes, self._kept = most, item_bytes, kept
        self._sent: list[tuple[int, T]] = []
        self._waiting: list[T] = []
        self._num_taken = 0

    def add(self, item: T) -> None:
        self._waiting.append(item)
        if self._kept is not None:
            del self._sent[: max(0, len(self._sent) + len(self._waiting) - self._kept)]
            del self._waiting[: -self._kept]

    def acknowledge(self, sequence: int) -> None:
        """Drop all items carried by reports up to `sequence`."""
        self._sent = [(number, item) for number, item in self._sent if number > sequence]

    def send_again(self) -> None:
        """Have all that is not acknowledged sent again: what a closed connection carried may be lost."""
        self._waiting[:0] = [item for _, item in self._sent]
        self._sent.clear()

    def take(self, sequence: int, limit_bytes: int) -> list[T]:
        """The items for report `sequence` in `limit_bytes`: those not sent on this connection."""
        taken = self._waiting[: min(self._most, limit_bytes // self._item_bytes)]
        del self._waiting[: len(taken)]
        self._sent += [(sequence, item) for item in taken]
        self._num_taken = len(taken)
        return taken

    def put_back(self, num_carried: int) -> None:
        """Note that the last report carried only the first `num_carried` items of `take`."""
        first = len(self._sent) - self._num_taken + num_carried
        self._waiting[:0] = [item for _, item in self._sent[first:]]
        del self._sent[first:]
        self._num_taken = num_carried

    @property
    def waits(self) -> bool:
        """Whether there are more items than the last report carried."""
        return bool(self._waiting)


def metrics_backlog() -> Backlog[StepMetrics]:
    """For the metrics of a VM's steps."""
    return Backlog(MOST_METRICS, _METRICS_BYTES)


def deaths_backlog() -> Backlog[WorkerReport]:
    """For the last reports of a VM's trainers, each reduced by `last_words`."""
    return Backlog(MOST_DEATHS, _DEATH_BYTES, kept=MOST_DEATHS)


def last_words(report: WorkerReport) -> WorkerReport:
    """The parts of an incarnation's last report that tell how it ended."""
    return WorkerReport.model_validate(report.model_dump(include=_LAST_WORDS))


_LAST_WORDS = {
    "worker",
    "incarnation",
    "trainer_protocol",
    "phase",
    "generation",
    "step",
    "formed",
    "failure",
    "miscount",
    "corruption",
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A report as JSON, and how much of it fitted."""

    text: str
    num_metrics: int  # carried, the oldest
    num_deaths: int  # likewise
    has_stacks: bool
    failed: dict[str, Failure] = field(default_factory=dict)  # workers whose own part did not fit


def as_beat(report: Report, told: Report | None) -> str | None:
    """A beat that stands for `report` after `told`, the last report on this connection; None if more than
    progress has changed."""
    if told is None or report.notice_deadline_s is not None:
        return None
    if report.metrics or report.deaths or report.stacks:
        return None
    if any(getattr(report, name) != getattr(told, name) for name in _NEWS):
        return None
    return Beat(sequence=report.sequence, progress=report.progress).model_dump_json()


_NEWS = tuple(Report.model_fields.keys() - Beat.model_fields.keys())


def encode(report: Report, limit_bytes: int) -> Encoded:
    """Encode the report as JSON of at most `limit_bytes`, unless even its required part is larger."""
    failed: dict[str, Failure] = {}
    while True:
        try:
            text = report.model_dump_json()
        except ValueError:  # also pydantic's own
            report = _without_unwritable(report, failed)
            continue
        if len(text.encode()) <= limit_bytes or len(failed) == len(report.workers):
            num_metrics, num_deaths = len(report.metrics), len(report.deaths)
            return Encoded(text, num_metrics, num_deaths, bool(report.stacks), failed)
        if report.stacks:
            report = report.model_copy(update={"stacks": _shortened(report.stacks)})
        elif report.metrics:
            report = report.model_copy(update={"metrics": report.metrics[: len(report.metrics) // 2]})
        elif report.deaths:
            report = report.model_copy(update={"deaths": report.deaths[: len(report.deaths) // 2]})
        else:
            report = _without_largest(report, limit_bytes, failed)


def _shortened(stacks: Sequence[Stacks]) -> list[Stacks]:
    """The second half of each, which shows the compute thread; empty if little would be left."""
    return [
        each.model_copy(update={"text": each.text[len(each.text) // 2 :]})
        for each in stacks
        if len(each.text) >= 2 * _LEAST_STACKS_CHARS
    ]


def _without_largest(report: Report, limit_bytes: int, failed: dict[str, Failure]) -> Report:
    """Fail the worker with the largest part, and report it without that part."""
    sizes = {w.worker: len(w.model_dump_json()) for w in report.workers if w.worker not in failed}
    name = max(sizes, key=sizes.__getitem__)
    message = f"its report has {sizes[name]} bytes, and the manager takes {limit_bytes} of a whole VM"
    return _without(report, name, message, failed)


def _without_unwritable(report: Report, failed: dict[str, Failure]) -> Report:
    """Fail the first worker with a part that cannot be JSON."""
    for worker in report.workers:
        try:
            worker.model_dump_json()
        except ValueError as error:
            return _without(report, worker.worker, f"its report cannot be written: {error}", failed)
    raise AssertionError("all parts but those of workers are the agent's own")


def _without(report: Report, name: str, message: str, failed: dict[str, Failure]) -> Report:
    """Fail this worker, and report it without its own part."""
    failed[name] = Failure(kind="internal", message=message)
    workers = [
        WorkerReport(worker=name, incarnation=w.incarnation, phase=Phase.EXITED, failure=failed[name])
        if w.worker == name
        else w
        for w in report.workers
    ]
    return report.model_copy(update={"workers": workers})
