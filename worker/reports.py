"""What an agent reports, made to fit into one frame.

Metrics are repeated until they are acknowledged, so after a long absence there are many of them: they are
sent in pieces, the oldest first. A worker whose own part does not fit has failed.
"""

from __future__ import annotations

from .bounds import MOST_METRICS
from .messages import Failure, Phase, Report, StepMetrics, WorkerReport

_METRICS_BYTES = 512  # of one step as JSON, at most


class Backlog:
    """Metrics that are not acknowledged, with the number of the report that first carried each."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, StepMetrics]] = []
        self._waiting: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        self._waiting.append(metrics)

    def acknowledge(self, sequence: int) -> None:
        """The manager has all that was carried up to report `sequence`."""
        self._sent = [(number, item) for number, item in self._sent if number > sequence]

    def take(self, sequence: int, limit_bytes: int) -> list[StepMetrics]:
        """What report `sequence` carries in half of `limit_bytes`: what is not acknowledged, then what is
        new."""
        most = min(MOST_METRICS, limit_bytes // 2 // _METRICS_BYTES)
        self._waiting[:0] = [item for _, item in self._sent[most:]]
        del self._sent[most:]
        room = most - len(self._sent)
        self._sent += [(sequence, item) for item in self._waiting[:room]]
        del self._waiting[:room]
        return [item for _, item in self._sent]

    @property
    def waits(self) -> bool:
        """Whether there is more than went into the last report."""
        return bool(self._waiting)


def encode(report: Report, limit_bytes: int) -> tuple[str, dict[str, Failure]]:
    """The report as JSON of at most `limit_bytes`; and failures of workers, by name, whose own part is too
    large for that. They are reported without it."""
    workers = {worker.worker: worker for worker in report.workers}
    failed: dict[str, Failure] = {}
    while True:
        text = report.model_copy(update={"workers": list(workers.values())}).model_dump_json()
        if len(text.encode()) <= limit_bytes or len(failed) == len(workers):
            return text, failed
        sizes = {name: len(w.model_dump_json()) for name, w in workers.items() if name not in failed}
        name = max(sizes, key=sizes.__getitem__)
        message = f"its report has {sizes[name]} bytes, and the manager takes {limit_bytes} of a whole VM"
        failed[name] = Failure(kind="internal", message=message)
        workers[name] = WorkerReport(
            worker=name, incarnation=workers[name].incarnation, phase=Phase.EXITED, failure=failed[name]
        )
