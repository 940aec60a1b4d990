"""How workers' own timings change a job: its calibration, and who is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..facts import Recalibrated, WorkerPaced
from ..state import JobState, Slow


def _recalibrated(state: JobState, fact: Recalibrated) -> JobState:
    calibration = dict(state.calibration or {})
    for name in ("forward_s", "backward_s", "input_s", "weight_s"):
        if not calibration.get(name):  # halves, which older calibrations do not have
            continue
        calibration[name] = [t * scale for t, scale in zip(calibration[name], fact.scales, strict=True)]
    return state.changed(calibration=calibration, recalibrated_at=fact.at, paces_changed_at=fact.at)


def _worker_paced(state: JobState, fact: WorkerPaced) -> JobState:
    slow, times = dict(state.slow), dict(state.times_slow)
    before = slow.pop(fact.worker, None)
    if fact.slowdown != 1.0:
        times[fact.worker] = times.get(fact.worker, 0) + (before is None)
        slow[fact.worker] = Slow(fact.slowdown, fact.incarnation, fact.at, times[fact.worker])
    return state.changed(
        slow=MappingProxyType(slow),
        times_slow=MappingProxyType(times),
        paces_changed_at=fact.at,
    )


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    Recalibrated: _recalibrated,
    WorkerPaced: _worker_paced,
}
