"""What events say about the present, taken down as vitals."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ...protocol.messages import Phase, Report, WorkerReport
from . import silence
from .events import (
    ConnectionClosed,
    ContinueRequested,
    Event,
    JobSubmitted,
    ManagerStarted,
    OffersSeen,
    ReportReceived,
    Tick,
    Together,
)
from .state import Generation, JobState, vm_of
from .timing import Timing
from .vitals import Pulse, Vitals

_SUSPENDED_S = 2.0  # ticks are 0.25 s apart, and up to a second more after a long decision
_STEPPED = frozenset((Phase.RUNNING, Phase.HELD, Phase.FINISHED))


def observe(state: JobState, vitals: Vitals, event: Event, timing: Timing) -> Vitals:
    """The vitals with what `event` says about the present; answers to commands are taken by the rules."""
    match event:
        case ManagerStarted():
            return Vitals(started_at=event.now)
        case JobSubmitted():
            return Vitals(started_at=event.now) if state.spec is None else vitals
        case ContinueRequested():
            return Vitals(started_at=event.now) if state.ended is not None else vitals
        case OffersSeen():
            return replace(vitals, offers=event.offers, manager_url=event.manager_url)
        case Tick():
            vitals = _pruned(state, _ticked(vitals, event.now, timing))
            return silence.judge(state, vitals, event.now, timing)
        case ReportReceived() | ConnectionClosed():
            return _heard(state, vitals, (event,), event.now, timing)
        case Together():
            return _heard(state, vitals, event.events, event.now, timing)
        case _:
            return vitals


def _ticked(vitals: Vitals, now: float, timing: Timing) -> Vitals:
    # A manager that was itself suspended has heard nobody: that is no proof that they are gone. One
    # whose ticks are merely as late as they may be was not, however short the lease.
    late_s = max(timing.vm_lease_s / 2, _SUSPENDED_S)
    suspended = vitals.ticked_at is not None and now - vitals.ticked_at > late_s
    return replace(vitals, ticked_at=now, started_at=now if suspended else vitals.started_at)


def _pruned(state: JobState, vitals: Vitals) -> Vitals:
    """Without the reports of VMs that ended, once no generation that may be asked about has them."""
    if len(vitals.pulses) <= len(state.live_vms):
        return vitals
    present = (state.planned, state.current, *state.history[-1:])
    members = {vm_of(worker) for g in present if g is not None for worker, _ in g.members}
    pulses = {vm: p for vm, p in vitals.pulses.items() if vm in state.vms.live or vm in members}
    if len(pulses) == len(vitals.pulses):
        return vitals
    return vitals.with_pulses(pulses)


def _heard(state: JobState, vitals: Vitals, events: Iterable[Event], now: float, timing: Timing) -> Vitals:
    """What reports and closed connections change."""
    pulses: dict[str, Pulse] = {}
    reported: set[str] = set()
    stepped = closed = False
    newest_step, measured = vitals.newest_step, vitals.measured
    members = {worker for worker, _ in state.current.members} if state.current is not None else set[str]()
    forming = state.current.number if state.current is not None and state.current.formed is None else None
    stepping = silence.stepping_generation(state)
    for event in events:
        if isinstance(event, ConnectionClosed):
            pulse = pulses.get(event.vm) or vitals.pulses.get(event.vm)
            if pulse is not None and pulse.closed_at is None:
                pulses[event.vm] = replace(pulse, closed_at=event.now)
                closed = True
        elif isinstance(event, ReportReceived):
            report = event.report
            vm = state.vms.get(report.vm)
            pulse = pulses.get(report.vm) or vitals.pulses.get(report.vm)
            if vm is None or not vm.live or (pulse is not None and report.sequence <= pulse.report.sequence):
                continue
            pulses[report.vm] = Pulse(report, event.now, moved=_moved(pulse, report, event.now))
            if report.metrics:
                measured = report.metrics[-1].generation, report.metrics[-1].seconds
            reported.add(report.vm)
            steps = [w.step for w in report.workers if _steps_on(members, w) and w.generation != forming]
            newest_step = max([newest_step, *steps])
            if stepping is not None and pulse is not None and _has_stepped(stepping, pulse.report, report):
                stepped = True
    if not pulses:
        return vitals
    vitals = vitals.with_pulses({**vitals.pulses, **pulses})
    vitals = replace(vitals, newest_step=newest_step, measured=measured)
    if stepped:
        vitals = replace(vitals, stepped_at=now)
    if closed and _most_dropped(state, vitals, now, timing):
        vitals = replace(vitals, dropped_at=now)
    return silence.heard_again(vitals, reported, now)


def _moved(before: Pulse | None, report: Report, now: float) -> tuple[float, ...]:
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


def _most_dropped(state: JobState, vitals: Vitals, now: float, timing: Timing) -> bool:
    """Whether the connections of most VMs closed within a lease: no sign that any one of them is gone."""
    joined = [vm.vm for vm in state.live_vms if vm.joined]
    closed = [pulse.closed_at for vm in joined if (pulse := vitals.pulses.get(vm)) is not None]
    together = sum(at is not None and now - at < timing.vm_lease_s for at in closed)
    return 2 * together > len(joined)


def _steps_on(members: Collection[str], worker: WorkerReport) -> bool:
    """Whether the worker's step is one of the surviving history, as far as can be told."""
    return worker.worker in members and worker.phase in _STEPPED
