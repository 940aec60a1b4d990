"""Time and memory of any contiguous sections as one stage, computed once for a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ..pipeline import Range, Schedule
from ..simulator import Calibration, to_ns
from .memory import StageMemory, stage_memory


@lru_cache(maxsize=16)
def stage_table(calibration: Calibration, schedule: Schedule = Schedule.VARUNA) -> StageTable:
    """Cached, so that its memo is shared by equal calibrations."""
    return StageTable(calibration, schedule)


class StageTable:
    """Times of one micro-batch in whole nanoseconds, so that they do not depend on the order of adding.

    `own_ns` is what the worker's code adds to each operation; a worker's slowdown does not multiply it.
    """

    def __init__(self, calibration: Calibration, schedule: Schedule) -> None:
        self.calibration = calibration
        self.num_sections = calibration.num_sections
        self._frozen = calibration.frozen
        self.forward_ns = _sums(calibration.forward_s)
        self.backward_ns = _sums(calibration.backward_s)
        self.own_ns = to_ns(calibration.operation_s)
        self.schedule = schedule
        self._links = calibration.inter_vm, calibration.intra_vm
        self._memory: dict[tuple[int, int, bool], StageMemory] = {}

    def recomputes(self, stop: int, recompute: bool) -> bool:
        """Whether a stage that ends before section `stop` recomputes: the last stage only where forwards
        come first, as in GPipe (§3.2), a stage of frozen sections never."""
        is_last = stop == self.num_sections
        return recompute and stop > self._frozen and (not is_last or self.schedule.forwards_first)

    def work_ns(self, start: int, stop: int, recompute: bool, slowdown: float = 1.0) -> int:
        """All of a stage's operations for one micro-batch."""
        again = self.recomputes(stop, recompute)
        compute_ns = self.forward_ns[stop] - self.forward_ns[start]
        compute_ns += self.backward_ns[stop] - self.backward_ns[start]
        if again:
            compute_ns += self.again_ns(start, stop)
        if slowdown != 1.0:
            compute_ns = round(compute_ns * slowdown)
        return compute_ns + (3 if again else 2) * self.own_ns

    def again_ns(self, start: int, stop: int) -> int:
        """A stage's recomputation, which skips frozen sections."""
        return self.forward_ns[stop] - self.forward_ns[max(start, min(self._frozen, stop))]

    def message_ns(self, size_bytes: int) -> int:
        """The least time of a message between stages: over the faster link, without jitter."""
        least_s = min(link.latency_s + link.occupied_s(size_bytes) for link in self._links)
        return to_ns(least_s + self.calibration.message_s)

    def ring_ns(self, size_bytes: int, ring: int) -> int:
        """The least time of an all-reduce over `ring` workers."""
        if ring < 2:
            return 0
        least_s = min(link.allreduce_s(size_bytes, ring) for link in self._links)
        return to_ns(least_s + self.calibration.collective_s)

    def memory(self, start: int, stop: int, recompute: bool) -> StageMemory:
        """See `stage_memory`."""
        key = (start, stop, recompute)
        if key not in self._memory:
            span = Range(start, stop)
            self._memory[key] = stage_memory(
                self.calibration, span, recompute=recompute, schedule=self.schedule
            )
        return self._memory[key]


def _sums(seconds: Sequence[float]) -> list[int]:
    return list(accumulate(map(to_ns, seconds), initial=0))
