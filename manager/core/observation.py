"""What events say about the present, taken down as observations."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ...protocol.messages import Phase, Report, WorkerReport
from . import silence
from .events import (
    Batch,
    ConnectionClosed,
    ContinueRequested,
    Event,
    JobSubmitted,
    ManagerStarted,
    OffersSeen,
    ReportReceived,
    Tick,
)
from .observations import LastReport, Observations
from .state import Generation, JobState, vm_of
from .timing import Timing

_SUSPENDED_S = 2.0  # ticks are 0.25 s apart, and up to a second more after a long decision
_STEPPED = frozenset((Phase.RUNNING, Phase.HELD, Phase.FINISHED))


def observe(state: JobState, observations: Observations, event: Event, timing: Timing) -> Observations:
    """`observations` with what `event` says of the present; the rules take answers to commands."""
    match event:
        case ManagerStarted():
            return Observations(started_at=event.now, stepped_at=event.now)
        case JobSubmitted():
            return Observations(started_at=event.now) if state.spec is None else observations
        case ContinueRequested():
            return Observations(started_at=event.now) if state.ended is not None else observations
        case OffersSeen():
            return replace(
                observations,
                offers=event.offers,
                unanswered=event.unanswered,
                manager_url=event.manager_url,
            )
        case Tick():
            observations = _pruned(state, _ticked(observations, event.now, timing))
            return silence.judge(state, observations, event.now, timing)
        case ReportReceived() | ConnectionClosed():
            return _heard(state, observations, (event,), event.now, timing)
        case Batch():
            return _heard(state, observations, event.events, event.now, timing)
        case _:
            return observations


def _ticked(observations: Observations, now: float, timing: Timing) -> Observations:
    # A manager that was itself suspended has heard nobody: that is no proof that they are gone. One
    # whose ticks are merely as late as they may be was not, however short the lease.
    late_s = max(timing.vm_lease_s / 2, _SUSPENDED_S)
    suspended = observations.ticked_at is not None and now - observations.ticked_at > late_s
    return replace(observations, ticked_at=now, started_at=now if suspended else observations.started_at)


def _pruned(state: JobState, observations: Observations) -> Observations:
    """Without the reports of VMs that ended, once no generation that may be asked about has them."""
    if len(observations.last_reports) <= len(state.live_vms):
        return observations
    present = (state.planned, state.current, *state.history[-1:])
    members = {vm_of(worker) for g in present if g is not None for worker, _ in g.members}
    last_reports = {
        vm: p for vm, p in observations.last_reports.items() if vm in state.vms.live or vm in members
    }
    if len(last_reports) == len(observations.last_reports):
        return observations
    return observations.with_last_reports(last_reports)


def _heard(
    state: JobState, observations: Observations, events: Iterable[Event], now: float, timing: Timing
) -> Observations:
    """What reports and closed connections change."""
    last_reports: dict[str, LastReport] = {}
    reported: set[str] = set()
    stepped_at: float | None = None
    closed = False
    newest_step, measured = observations.newest_step, observations.measured
    members = {worker for worker, _ in state.current.members} if state.current is not None else set[str]()
    forming = state.current.number if state.current is not None and state.current.formed is None else None
    stepping = silence.stepping_generation(state)
    for event in events:
        if isinstance(event, ConnectionClosed):
            last_report = last_reports.get(event.vm) or observations.last_reports.get(event.vm)
            if last_report is not None and last_report.closed_at is None:
                last_reports[event.vm] = replace(last_report, closed_at=event.now)
                closed = True
        elif isinstance(event, ReportReceived):
            report = event.report
            vm = state.vms.get(report.vm)
            last_report = last_reports.get(report.vm) or observations.last_reports.get(report.vm)
            if (
                vm is None
                or not vm.live
                or (last_report is not None and report.sequence <= last_report.report.sequence)
            ):
                continue
            last_reports[report.vm] = LastReport(
                report, event.now, moved=_moved(last_report, report, event.now)
            )
            if report.metrics:
                measured = report.metrics[-1].generation, report.metrics[-1].seconds
            reported.add(report.vm)
            steps = [
                worker.step
                for worker in report.workers
                if _steps_on(members, worker)
                and worker.generation != forming
                and worker.generation > state.discarded
            ]
            newest_step = max([newest_step, *steps])
            if (
                stepping is not None
                and last_report is not None
                and _has_stepped(stepping, last_report.report, report)
            ):
                stepped_at = event.now
    if not last_reports:
        return observations
    observations = observations.with_last_reports({**observations.last_reports, **last_reports})
    observations = replace(observations, newest_step=newest_step, measured=measured)
    if stepped_at is not None:
        observations = replace(observations, stepped_at=stepped_at)
    if closed and _most_dropped(state, observations, now, timing):
        observations = replace(observations, dropped_at=now)
    return silence.heard_again(observations, reported, now)


def _moved(before: LastReport | None, report: Report, now: float) -> tuple[float, ...]:
    """When each worker of `report` was last seen to make progress."""
    if (
        before is not None
        and report.workers is before.report.workers
        and len(before.moved) == len(before.report.progress) == len(report.progress)
    ):  # a beat
        steps = zip(before.moved, before.report.progress, report.progress, strict=True)
        return tuple(at if was.count == is_.count else now for at, was, is_ in steps)
    known = dict(zip(_marks(before.report), before.moved, strict=False)) if before is not None else {}
    return tuple(known.get(mark, now) for mark in _marks(report))


def _marks(report: Report) -> list[tuple[object, ...]]:
    """What of each worker changes as it gets on."""
    counts = [progress.count for progress in report.progress]
    counts += [0] * (len(report.workers) - len(counts))
    return [
        (w.worker, w.incarnation, w.phase, w.generation, w.prepared, w.step, w.profiling, count)
        for w, count in zip(report.workers, counts, strict=False)
    ]


def _has_stepped(stepping: Generation, before: Report, report: Report) -> bool:
    """Whether a worker of the VM reports a step of the generation that it did not before."""
    known = {worker.worker: worker.step for worker in before.workers}
    return any(
        worker.generation == stepping.number
        and worker.phase in _STEPPED
        and worker.step > known.get(worker.worker, worker.step)
        for worker in report.workers
    )


def _most_dropped(state: JobState, observations: Observations, now: float, timing: Timing) -> bool:
    """Whether the connections of most VMs closed within a lease: no sign that any one of them is gone."""
    joined = [vm.vm for vm in state.live_vms if vm.joined]
    closed = [
        last_report.closed_at
        for vm in joined
        if (last_report := observations.last_reports.get(vm)) is not None
    ]
    together = sum(at is not None and now - at < timing.vm_lease_s for at in closed)
    return 2 * together > len(joined)


def _steps_on(members: Collection[str], worker: WorkerReport) -> bool:
    """Whether the worker's step is one of the surviving history, as far as can be told."""
    return worker.worker in members and worker.phase in _STEPPED
