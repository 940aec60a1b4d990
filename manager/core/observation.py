"""What events say about the present, taken down as observations."""

from __future__ import annotations

from collections.abc import Iterable
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
from .state import JobState, vm_of
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
            if event.share != observations.share:
                observations = replace(observations, share=event.share)
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
    last_reports = dict(observations.last_reports)
    news: list[tuple[LastReport | None, LastReport]] = []  # what each VM said before, and says now
    closed = False
    for event in events:
        if isinstance(event, ConnectionClosed):
            before = last_reports.get(event.vm)
            if before is not None and before.closed_at is None:
                last_reports[event.vm] = replace(before, closed_at=event.now)
                closed = True
        elif isinstance(event, ReportReceived) and event.report.vm in state.vms.live:
            report, before = event.report, last_reports.get(event.report.vm)
            if before is None or report.sequence > before.report.sequence:
                latest = LastReport(report, event.now, moved=_moved(before, report, event.now))
                last_reports[report.vm] = latest
                news.append((before, latest))
    if not news and not closed:
        return observations
    members = {worker for worker, _ in state.current.members} if state.current is not None else set[str]()
    steps = [
        state.possible(worker.step)
        for _, latest in news
        for worker in latest.report.workers
        if worker.worker in members and _is_on_history(state, worker)
    ]
    metrics = [latest.report.metrics[-1] for _, latest in news if latest.report.metrics]
    stepped_at = [latest.at for before, latest in news if _has_stepped(state, before, latest)]
    observations = replace(
        observations.with_last_reports(last_reports),
        newest_step=max([observations.newest_step, *steps]),
        measured=(metrics[-1].generation, metrics[-1].seconds) if metrics else observations.measured,
        stepped_at=stepped_at[-1] if stepped_at else observations.stepped_at,
    )
    if closed and _most_dropped(state, observations, now, timing):
        observations = replace(observations, dropped_at=now)
    return silence.heard_again(observations, {latest.report.vm for _, latest in news}, now)


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


def _is_on_history(state: JobState, worker: WorkerReport) -> bool:
    """Whether the step that a member reports is one of the surviving history, as far as can be told."""
    current = state.current
    if current is None or worker.phase not in _STEPPED or worker.generation <= state.discarded:
        return False
    return current.formed is not None or worker.generation != current.number


def _has_stepped(state: JobState, before: LastReport | None, latest: LastReport) -> bool:
    """Whether a worker of the VM reports a step of the generation that steps that it did not before."""
    stepping = silence.stepping_generation(state)
    if stepping is None or before is None:
        return False
    known = {worker.worker: worker.step for worker in before.report.workers}
    return any(
        worker.generation == stepping.number
        and worker.phase in _STEPPED
        and worker.step > known.get(worker.worker, worker.step)
        for worker in latest.report.workers
    )


def _most_dropped(state: JobState, observations: Observations, now: float, timing: Timing) -> bool:
    """Whether the connections of most VMs closed within a lease: no sign that any one of them is gone."""
    joined = [vm.vm for vm in state.live_vms if vm.joined]
    closed = [last_report.closed_at for vm in joined if (last_report := observations.last_reports.get(vm))]
    together = sum(at is not None and now - at < timing.vm_lease_s for at in closed)
    return 2 * together > len(joined)
