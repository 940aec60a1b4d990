"""How facts about measuring change a job: a calibration under way, and what workers' own timings add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .facts import (
    ProbeDealt,
    ProbeEnded,
    ProbeOpened,
    Recalibrated,
    SectionsMeasured,
    ShareDealt,
    Surveyed,
    WorkerPaced,
)
from .state import JobState, Measuring, Probe, Slow


def _surveyed(state: JobState, fact: Surveyed) -> JobState:
    return state.changed(measuring=Measuring(fact.survey, fact.at))


def _share_dealt(state: JobState, fact: ShareDealt) -> JobState:
    if state.measuring is None:
        return state
    dealt = (*state.measuring.dealt, ((fact.worker, fact.incarnation), fact.share))
    return state.changed(measuring=replace(state.measuring, dealt=dealt))


def _sections_measured(state: JobState, fact: SectionsMeasured) -> JobState:
    if state.measuring is None:
        return state
    return state.changed(measuring=replace(state.measuring, rows=(*state.measuring.rows, *fact.rows)))


def _probe_dealt(state: JobState, fact: ProbeDealt) -> JobState:
    if state.measuring is None:
        return state
    probe = Probe(fact.number, fact.members, fact.at)
    return state.changed(measuring=replace(state.measuring, probe=probe, last_probe=fact.number))


def _probe_opened(state: JobState, fact: ProbeOpened) -> JobState:
    measuring = state.measuring
    if measuring is None or measuring.probe is None or measuring.probe.number != fact.number:
        return state
    return state.changed(measuring=replace(measuring, probe=replace(measuring.probe, endpoint=fact.endpoint)))


def _probe_ended(state: JobState, fact: ProbeEnded) -> JobState:
    measuring = state.measuring
    if measuring is None or measuring.probe is None or measuring.probe.number != fact.number:
        return state
    ended = replace(measuring, probe=None, wires=fact.wires, allreduces=fact.allreduces)
    return state.changed(measuring=ended)


def _recalibrated(state: JobState, fact: Recalibrated) -> JobState:
    calibration = dict(state.calibration or {})
    for name in ("forward_s", "backward_s"):
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
    Surveyed: _surveyed,
    ShareDealt: _share_dealt,
    SectionsMeasured: _sections_measured,
    ProbeDealt: _probe_dealt,
    ProbeOpened: _probe_opened,
    ProbeEnded: _probe_ended,
    Recalibrated: _recalibrated,
    WorkerPaced: _worker_paced,
}
