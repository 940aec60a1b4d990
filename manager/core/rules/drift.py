"""A run that drifts from its calibration, and workers that are slower than their peers.

Every report of a new step tells how long a micro-batch took on its worker; divided by what the calibration
says of the worker's sections it is a *pace*: 1 as calibrated, 2 half as fast. A worker's pace is the median
over its last steps. What its sections' hosts have in common (their lower median; all workers', where a range
has one host) is the calibration's fault, and the rest is the worker's (Varuna §4.6, fail-stutter machines).

Nothing is concluded from a few noisy seconds: a window of steps and of time must lie beyond a bound by three
quarters, the way back has another bound, and a calibration is changed once in a while at most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ....protocol.messages import Phase, WorkerReport
from ..events import ReportReceived, Tick, Together
from ..facts import Recalibrated, WorkerPaced
from ..state import Generation, Seat
from ..turn import Turn, seat_of
from ..vitals import Pace

_SAMPLES = 16  # in a window, at most


def watch(turn: Turn) -> None:
    """Take note of steps; now and then, conclude."""
    state, current = turn.state, turn.state.current
    if current is None or not state.running or not state.calibration or not state.active:
        return
    if state.recipe is None or state.recipe.device_kind != "cpu":
        return  # what a trainer times there is how long it takes to ask the device
    event = turn.event
    if isinstance(event, Tick) and state.planned is None:
        _conclude(turn, current)
    parts = event.events if isinstance(event, Together) else (event,)
    reports = [part.report for part in parts if isinstance(part, ReportReceived)]
    if reports:
        _note(turn, current, [worker for report in reports for worker in report.workers])


def _note(turn: Turn, current: Generation, workers: Iterable[WorkerReport]) -> None:
    ranks = {seat: rank for rank, seat in enumerate(current.seats)}
    paces = {seat: pace for seat, pace in turn.vitals.paces.items() if seat in ranks}
    for worker in workers:
        seat, took_s = seat_of(worker), (worker.forward_s or 0.0) + (worker.backward_s or 0.0)
        if seat not in ranks or worker.phase is not Phase.RUNNING or worker.generation != current.number:
            continue
        expected_s = _expected_s(turn.state.calibration or {}, current.plan["ranges"][ranks[seat]])
        before = paces.get(seat)
        if before is None or before.generation != current.number:
            before = Pace(current.number, worker.step, turn.now, turn.now, ())  # the first step warms up
        elif worker.step > before.step and took_s > 0 and expected_s > 0:
            if turn.now - before.sampled_at < turn.timing.drift_s / _SAMPLES:
                continue  # a window is to hold a minute, however short steps are
            ratios = (*before.ratios, took_s / expected_s)[-_SAMPLES:]
            before = replace(before, step=worker.step, sampled_at=turn.now, ratios=ratios)
        paces[seat] = before
    turn.vitals = replace(turn.vitals, paces=MappingProxyType(paces))


def _expected_s(calibration: Mapping[str, Sequence[float]], span: Sequence[int]) -> float:
    forward_s, backward_s = calibration["forward_s"], calibration["backward_s"]
    return sum(forward_s[span[0] : span[1]]) + sum(backward_s[span[0] : span[1]])


def _conclude(turn: Turn, current: Generation) -> None:
    """When all workers have been watched for long enough: tell workers from sections, and both from noise."""
    timing = turn.timing
    paces = {seat: turn.vitals.paces.get(seat) for seat in current.seats}
    known = {seat: pace for seat, pace in paces.items() if pace is not None and _is_full(turn, current, pace)}
    if len(known) < len(current.seats):
        return
    common = common_paces([tuple(span) for span in current.plan["ranges"]], [known[s].median for s in known])
    for seat, factor in zip(current.seats, common, strict=True):
        _judge(turn, seat, known[seat], factor)
    last_at = turn.state.recalibrated_at
    if last_at is not None and turn.elapsed_s(last_at) < timing.recalibrate_s:
        return
    bound = math.log(timing.drift)
    if max(abs(math.log(factor)) for factor in common) <= bound:
        return
    scales = [1.0] * _num_sections(turn)
    for (start, stop), factor in zip(current.plan["ranges"], common, strict=True):
        scales[start:stop] = [factor] * (stop - start)
    turn.fact(Recalibrated(at=turn.now, scales=tuple(float(f"{scale:.4g}") for scale in scales)))
    turn.vitals = replace(turn.vitals, paces=MappingProxyType({}))


def common_paces(ranges: Sequence[tuple[int, ...]], paces: Sequence[float]) -> list[float]:
    """For each worker, the pace that its sections' hosts have in common: of one that is slower than the
    others of its range nothing is held against the range."""
    by_range: dict[tuple[int, ...], list[float]] = {}
    for span, pace in zip(ranges, paces, strict=True):
        by_range.setdefault(span, []).append(pace)
    overall = statistics.median_low(paces)
    return [statistics.median_low(by_range[span]) if len(by_range[span]) > 1 else overall for span in ranges]


def _is_full(turn: Turn, current: Generation, pace: Pace) -> bool:
    timing = turn.timing
    enough = len(pace.ratios) >= timing.drift_steps and turn.now - pace.since >= timing.drift_s
    return pace.generation == current.number and enough


def _judge(turn: Turn, seat: Seat, pace: Pace, factor: float) -> None:
    """Whether the worker is slow, beyond what the calibration is wrong by."""
    timing, worker = turn.timing, seat[0]
    before = turn.state.slow.get(worker)
    found = pace.median / factor
    if pace.quarter(upper=False) / factor > timing.slow:
        if before is None or abs(math.log(found / before.slowdown)) > math.log(timing.drift):
            slowdown = float(f"{found:.3g}")
            turn.fact(WorkerPaced(at=turn.now, worker=worker, incarnation=seat[1], slowdown=slowdown))
    elif before is not None and pace.quarter(upper=True) / factor < timing.recovered:
        turn.fact(WorkerPaced(at=turn.now, worker=worker, incarnation=seat[1], slowdown=1.0))


def _num_sections(turn: Turn) -> int:
    assert turn.state.recipe is not None, "what runs has a recipe"
    return turn.state.recipe.num_sections


def try_again(turn: Turn) -> None:
    """A slow worker that no plan has used for long counts as any other: it may have recovered unseen."""
    state = turn.state
    if not state.slow or state.current is None or not isinstance(turn.event, Tick):
        return
    used = {worker for worker, _ in state.current.seats}
    for worker, slow in state.slow.items():
        patience_s = turn.timing.slow_retry_s * 2 ** min(slow.times - 1, 6)
        if worker not in used and turn.elapsed_s(slow.since) > patience_s:
            turn.fact(WorkerPaced(at=turn.now, worker=worker, incarnation=slow.incarnation, slowdown=1.0))
