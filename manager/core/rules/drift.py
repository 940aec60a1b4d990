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
from typing import Any

from ....protocol.messages import Phase, WorkerReport
from ..context import Context, incarnation_of
from ..events import Batch, ReportReceived, Tick
from ..facts import Recalibrated, WorkerPaced
from ..observations import StepPace
from ..state import Generation, Incarnation
from ..strikes.table import Kind

_SAMPLES = 16  # in a window, at most


def watch(context: Context) -> None:
    """Take note of steps; now and then, conclude."""
    state, current = context.state, context.state.current
    if current is None or not state.running or not state.calibration or not state.active:
        return
    if state.recipe is None or state.recipe.device_kind != "cpu":
        return  # what a trainer times there is how long it takes to ask the device
    event = context.event
    if isinstance(event, Tick) and state.planned is None:
        _conclude(context, current)
    parts = event.events if isinstance(event, Batch) else (event,)
    reports = [part.report for part in parts if isinstance(part, ReportReceived)]
    if reports:
        _note(context, current, [worker for report in reports for worker in report.workers])


def _note(context: Context, current: Generation, workers: Iterable[WorkerReport]) -> None:
    ranks = {incarnation: rank for rank, incarnation in enumerate(current.incarnations)}
    paces = {
        incarnation: pace for incarnation, pace in context.observations.paces.items() if incarnation in ranks
    }
    for worker in workers:
        incarnation, took_s = incarnation_of(worker), (worker.forward_s or 0.0) + (worker.backward_s or 0.0)
        if (
            incarnation not in ranks
            or worker.phase is not Phase.RUNNING
            or worker.generation != current.number
        ):
            continue
        expected_s = _expected_s(context.state.calibration or {}, current.plan, ranks[incarnation])
        before = paces.get(incarnation)
        if before is None or before.generation != current.number:
            before = StepPace(
                current.number, worker.step, context.now, context.now, ()
            )  # the first step warms up
        elif worker.step > before.step and took_s > 0 and expected_s > 0:
            if context.now - before.sampled_at < context.timing.drift_s / _SAMPLES:
                continue  # a window is to hold a minute, however short steps are
            ratios = (*before.ratios, took_s / expected_s)[-_SAMPLES:]
            before = replace(before, step=worker.step, sampled_at=context.now, ratios=ratios)
        paces[incarnation] = before
    context.note(paces=MappingProxyType(paces))


def _expected_s(calibration: Mapping[str, Sequence[float]], plan: Mapping[str, Any], rank: int) -> float:
    """What a micro-batch takes on a worker: its forward, and its backward, whole or as I and W."""
    start, stop = plan["ranges"][rank]
    has_halves = plan.get("halves", False) and not plan["recompute"] and stop > plan.get("frozen", 0)
    names = ("forward_s", "input_s", "weight_s") if has_halves else ("forward_s", "backward_s")
    return sum(sum(calibration[name][start:stop]) for name in names)


def _conclude(context: Context, current: Generation) -> None:
    """When all workers have been watched for long enough: tell workers from sections, and both from noise."""
    timing = context.timing
    paces = {incarnation: context.observations.paces.get(incarnation) for incarnation in current.incarnations}
    known = {
        incarnation: pace
        for incarnation, pace in paces.items()
        if pace is not None and _is_full(context, current, pace)
    }
    if len(known) < len(current.incarnations):
        return
    common = common_paces([tuple(span) for span in current.plan["ranges"]], [known[s].median for s in known])
    for incarnation, factor in zip(current.incarnations, common, strict=True):
        _judge(context, incarnation, known[incarnation], factor)
    last_at = context.state.recalibrated_at
    if last_at is not None and context.elapsed_s(last_at) < timing.recalibrate_s:
        return
    bound = math.log(timing.drift)
    if max(abs(math.log(factor)) for factor in common) <= bound:
        return
    scales = [1.0] * max(stop for _, stop in current.plan["ranges"])
    for (start, stop), factor in zip(current.plan["ranges"], common, strict=True):
        scales[start:stop] = [factor] * (stop - start)
    context.fact(Recalibrated(at=context.now, scales=tuple(float(f"{scale:.4g}") for scale in scales)))
    context.note(paces=MappingProxyType({}))


def common_paces(ranges: Sequence[tuple[int, ...]], paces: Sequence[float]) -> list[float]:
    """For each worker, the pace that its sections' hosts have in common: of one that is slower than the
    others of its range nothing is held against the range."""
    by_range: dict[tuple[int, ...], list[float]] = {}
    for span, pace in zip(ranges, paces, strict=True):
        by_range.setdefault(span, []).append(pace)
    overall = statistics.median_low(paces)
    return [statistics.median_low(by_range[span]) if len(by_range[span]) > 1 else overall for span in ranges]


def _is_full(context: Context, current: Generation, pace: StepPace) -> bool:
    timing = context.timing
    enough = len(pace.ratios) >= timing.drift_steps and context.now - pace.since >= timing.drift_s
    return pace.generation == current.number and enough


def _judge(context: Context, incarnation: Incarnation, pace: StepPace, factor: float) -> None:
    """Whether the worker is slow, beyond what the calibration is wrong by."""
    timing, worker = context.timing, incarnation.worker
    before = context.state.slow.get(worker)
    found = pace.median / factor
    if pace.quarter(upper=False) / factor > timing.slow:
        if before is None or abs(math.log(found / before.slowdown)) > math.log(timing.drift):
            _set_pace(context, incarnation, float(f"{found:.3g}"))
    elif before is not None and pace.quarter(upper=True) / factor < timing.recovered:
        _set_pace(context, incarnation, 1.0)


def _set_pace(context: Context, incarnation: Incarnation, slowdown: float) -> None:
    worker, number = incarnation
    context.fact(WorkerPaced(at=context.now, worker=worker, incarnation=number, slowdown=slowdown))


def try_again(context: Context) -> None:
    """A slow worker that no plan has used for long counts as any other: it may have recovered unseen."""
    state = context.state
    if not state.slow or state.current is None or not isinstance(context.event, Tick):
        return
    used = {worker for worker, _ in state.current.incarnations}
    for worker, slow in state.slow.items():
        patience_s = context.row(Kind.SLOW).pause_s(context.strikes(Kind.SLOW, worker).count)
        if worker not in used and context.elapsed_s(slow.since) > patience_s:
            _set_pace(context, Incarnation(worker, slow.incarnation), 1.0)
