"""Vitals: what this manager has observed. In memory only, never journalled, empty after a restart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...worker.messages import At, Phase, Report, WorkerReport
from ..events import ConnectionClosed, Event, JobSubmitted, ManagerStarted, ReportReceived, Tick, Together
from ..state import Generation, JobState, Seat, vm_of
from . import silence
from .turn import Timing

if TYPE_CHECKING:
    from .drift import Pace
    from .stalls import Standstill

_EMPTY: Mapping[Any, Any] = MappingProxyType({})
_STEPPED = frozenset((Phase.RUNNING, Phase.HELD, Phase.FINISHED))


@dataclass(frozen=True, slots=True)
class Pulse:
    """The newest report of a VM."""

    report: Report
    at: float  # when it came
    closed_at: float | None = None  # its connection closed since
    moved: tuple[float, ...] = ()  # when the progress of each of its workers was last seen to change


@dataclass(frozen=True, slots=True)
class Planning:
    """A question that the planner has not answered yet."""

    generation: int
    seats: frozenset[Seat]
    asked_at: float
    cause: str
    detected_at: float
    reconsider: bool = False  # nothing has to change


@dataclass(frozen=True)
class Vitals:
    """Observations about one job."""

    started_at: float = 0.0  # leases count from here at the earliest
    ticked_at: float | None = None
    pulses: Mapping[str, Pulse] = field(default_factory=lambda: _EMPTY)  # by VM
    newest_step: int = 0  # highest step that a member of the open generation reported
    usable: frozenset[Seat] = frozenset()  # as last seen, to notice growth
    grown_at: float = 0.0
    planning: Planning | None = None
    planned_for: frozenset[Seat] = frozenset()  # seats about which the planner has given its answer
    answered_at: float = 0.0
    cause: tuple[str, float] | None = None  # why the next plan is needed, and when that was seen
    reconsidered_at: float = 0.0  # when the planner was last asked about changed paces
    paces: Mapping[Seat, Pace] = field(default_factory=lambda: _EMPTY)  # of the open generation's workers
    swept_at: float | None = None  # when the store was last looked through
    broken_since: float | None = None
    forming: tuple[int, float] | None = None  # the opened generation, and since when it has been free to form
    left_out: Mapping[Seat, float] = field(default_factory=lambda: _EMPTY)  # until when
    cuts: Mapping[frozenset[str], int] = field(default_factory=lambda: _EMPTY)  # of two workers: times lost
    unheard: frozenset[str] = frozenset()  # VMs that sent no report for a lease; see `silence`
    silent: frozenset[str] = frozenset()  # those of them of which nothing else shows that they live
    explained: frozenset[str] = frozenset()  # those that are unheard because of a loss that was reported
    isolated_since: float | None = None  # most fell silent at once: rather this manager is cut off
    stepped_at: float = 0.0  # when a new step of the generation that steps was last reported
    dropped_at: float | None = None  # when most connections had closed at once
    closed_at: float = 0.0  # when a generation was last closed
    measured: tuple[int, float] = (0, 0.0)  # a generation, and what its newest step took
    standstill: Standstill | None = None  # of the open generation, at the last tick
    asked_for_stacks: tuple[int, float] | None = None  # of which generation's members, and when

    def report_of(self, seat: Seat) -> WorkerReport | None:
        """The newest report of exactly this incarnation."""
        pulse, number = self._place(seat[0])
        report = pulse.report.workers[number] if pulse is not None else None
        return report if report is not None and report.incarnation == seat[1] else None

    def moved_at(self, seat: Seat) -> float:
        """When the worker was last seen to make progress, or this manager began to listen."""
        pulse, number = self._place(seat[0])
        if pulse is None or number >= len(pulse.moved):
            return self.started_at
        return max(pulse.moved[number], self.started_at)

    def at_of(self, worker: str) -> At | None:
        """What the worker said it is at; None if it does not say."""
        pulse, number = self._place(worker)
        progress = pulse.report.progress if pulse is not None else []
        return progress[number].at if number < len(progress) else None

    def measured_s(self, generation: int) -> float:
        """What the newest step of the generation took; 0 if none is known."""
        return self.measured[1] if self.measured[0] == generation else 0.0

    def _place(self, worker: str) -> tuple[Pulse | None, int]:
        pulse = self.pulses.get(vm_of(worker))
        for number, report in enumerate(pulse.report.workers if pulse is not None else ()):
            if report.worker == worker:
                return pulse, number
        return None, 0

    def since(self, at: float, now: float) -> float:
        """From when a bound counts that began at `at`.

        What was journalled by an earlier manager counts from when this one began, whichever way the wall
        clock was set between the two.
        """
        return at if self.started_at <= at <= now else self.started_at


def observe(state: JobState, vitals: Vitals, event: Event, timing: Timing) -> Vitals:
    """The vitals with what `event` says about the present; answers to commands are taken by the rules."""
    match event:
        case ManagerStarted():
            return Vitals(started_at=event.now)
        case JobSubmitted():
            return Vitals(started_at=event.now) if state.spec is None else vitals
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
    stalled = vitals.ticked_at is not None and now - vitals.ticked_at > timing.vm_lease_s / 2
    # A manager that was itself suspended has heard nobody: that is no proof that they are gone.
    return replace(vitals, ticked_at=now, started_at=now if stalled else vitals.started_at)


def _pruned(state: JobState, vitals: Vitals) -> Vitals:
    """Without the reports of VMs that ended, once no generation that may be asked about has them."""
    if len(vitals.pulses) <= len(state.live_vms):
        return vitals
    present = (state.planned, state.current, *state.history[-1:])
    members = {vm_of(worker) for g in present if g is not None for worker, _ in g.members}
    pulses = {vm: p for vm, p in vitals.pulses.items() if vm in state.vms.live or vm in members}
    if len(pulses) == len(vitals.pulses):
        return vitals
    return replace(vitals, pulses=MappingProxyType(pulses))


def _heard(state: JobState, vitals: Vitals, events: Iterable[Event], now: float, timing: Timing) -> Vitals:
    """What reports and closed connections change."""
    pulses: dict[str, Pulse] = {}
    reported: set[str] = set()
    stepped = closed = False
    newest_step, measured = vitals.newest_step, vitals.measured
    members = {worker for worker, _ in state.current.members} if state.current is not None else set[str]()
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
            steps = [worker.step for worker in report.workers if _steps_on(members, worker)]
            newest_step = max([newest_step, *steps])
            if stepping is not None and pulse is not None and _has_stepped(stepping, pulse.report, report):
                stepped = True
    if not pulses:
        return vitals
    everyone = MappingProxyType({**vitals.pulses, **pulses})
    vitals = replace(vitals, pulses=everyone, newest_step=newest_step, measured=measured)
    if stepped:
        vitals = replace(vitals, stepped_at=now)
    if closed and _most_dropped(state, vitals, now, timing):
        vitals = replace(vitals, dropped_at=now)
    return silence.heard_again(vitals, reported, now)


def _moved(before: Pulse | None, report: Report, now: float) -> tuple[float, ...]:
    """When each worker of `report` was last seen to make progress."""
    known = dict(zip(_signs(before.report), before.moved, strict=False)) if before is not None else {}
    return tuple(known.get(sign, now) for sign in _signs(report))


def _signs(report: Report) -> list[tuple[object, ...]]:
    """What of each worker changes as it gets on."""
    counts = [progress.count for progress in report.progress]
    counts += [0] * (len(report.workers) - len(counts))
    return [
        (w.worker, w.incarnation, w.phase, w.generation, w.prepared, w.step, len(w.rows), count)
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
