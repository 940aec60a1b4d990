"""Observations: what this manager has observed. In memory only, never journalled, empty after a restart."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ...protocol.messages import At, Report, WorkerReport
from ..spec.placement import Offer
from .events import GrowthComputed
from .pools.shares import Share
from .state import Incarnation, empty_mapping
from .strikes.ledger import Ledger
from .timing import Timing

_NOWHERE = (None, 0)
_WORTH_TELLING_S = 30.0
_MOST_TOLD = 8  # workers


@dataclass(frozen=True, slots=True)
class LastReport:
    """The newest report of a VM."""

    report: Report
    at: float  # when it came
    closed_at: float | None = None  # its connection closed since
    moved: tuple[float, ...] = ()  # when the progress of each of its workers was last seen to change


@dataclass(frozen=True, slots=True)
class Planning:
    """A question that the planner has not answered yet."""

    key: str
    generation: int
    incarnations: frozenset[Incarnation]
    asked_at: float
    cause: str
    detected_at: float
    reconsider: bool = False  # nothing has to change


@dataclass(frozen=True, slots=True)
class Growth:
    """A question to the planner whether more VMs would pay, and its answer once that is there."""

    about: Hashable  # all that the answer depends on
    key: str
    asked_at: float
    answer: GrowthComputed | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepPace:
    """Some of a worker's last steps in one generation: how many times longer than calibrated they took."""

    generation: int
    step: int
    since: float
    sampled_at: float
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    def quarter(self, upper: bool) -> float:
        """What three quarters of the window are above, or below if `upper`."""
        ordered = sorted(self.ratios, reverse=upper)
        return ordered[len(ordered) // 4]


@dataclass(frozen=True, slots=True)
class NoProgress:
    """How long a generation's members have made no progress, and what each was at when it last told."""

    lasted_s: float
    bound_s: float
    bound: str  # the fields of `Timing` that it follows from
    standing: Mapping[str, str]

    def describe(self) -> str | None:
        """For a user, long before anything follows; None while there is nothing to say."""
        if self.lasted_s < min(_WORTH_TELLING_S, self.bound_s / 3):
            return None
        at = [f"{worker} is {where}" for worker, where in list(self.standing.items())[:_MOST_TOLD]]
        if len(self.standing) > _MOST_TOLD:
            at.append(f"and {len(self.standing) - _MOST_TOLD} more")
        told = f"no progress for {self.lasted_s:.0f} s of {self.bound_s:.0f} s ({self.bound})"
        return ": ".join([told, ", ".join(at)] if at else [told])


@dataclass(frozen=True)
class Observations:
    """Observations about one job."""

    started_at: float = 0.0  # leases count from here at the earliest
    ticked_at: float | None = None
    last_reports: Mapping[str, LastReport] = field(
        default_factory=empty_mapping
    )  # by VM; see `with_last_reports`
    places: Mapping[str, tuple[LastReport, int]] = field(
        default_factory=empty_mapping
    )  # by worker: its report
    offers: tuple[Offer, ...] | None = None  # of the job's providers; None: not known yet
    unanswered: tuple[str, ...] = ()  # providers whose offers are not known yet, though others' are
    request_errors: Mapping[str, str] = field(
        default_factory=empty_mapping
    )  # by VM that was asked for: how the last call failed, if its outcome is not known
    manager_url: str = ""  # where a VM that is asked for now is to find its manager
    why_no_vm: str = ""  # why no more VMs are asked for, though more are wanted; empty if they are
    asks_singly_s: float | None = None  # one VM at a time is asked for, so long after the last unfit one
    copies_seen: int = 0  # the generation of which it was seen on how many VMs its sections live
    newest_step: int = 0  # highest step that a member of the open generation reported, once that has formed
    usable: frozenset[Incarnation] = frozenset()  # as last seen, to notice growth
    grown_at: float = 0.0
    planning: Planning | None = None
    planned_for: frozenset[Incarnation] = frozenset()  # about which the planner has given its answer
    answered_at: float = 0.0
    retry_at: float | None = None  # the planner failed: when it is asked again about the same workers
    kept: Hashable = None  # what was last said to stay, and beside what
    kept_until: float | None = None  # for how long that pays; None: whatever comes
    cause: tuple[str, float] | None = None  # why the next plan is needed, and when that was seen
    reconsidered_at: float = 0.0  # when the planner was last asked though nothing has to change
    paces: Mapping[Incarnation, StepPace] = field(
        default_factory=empty_mapping
    )  # of the open generation's workers
    share: Share = field(default_factory=Share)  # how many VMs it may have where other jobs want them, too
    needed_vms: int = 0  # one more than the VMs for which no plan was found
    growth: tuple[Growth, ...] = ()  # the last of these questions, each about something else, newest last
    swept_at: float | None = None  # when the store was last looked through
    strikes: Ledger = field(default_factory=Ledger)
    broken_since: float | None = None
    forming: tuple[int, float] | None = None  # the opened generation, and since when it has been free to form
    left_out: Mapping[Incarnation, float] = field(default_factory=empty_mapping)  # until when
    unheard: frozenset[str] = frozenset()  # VMs that sent no report for a lease, or are lost; see `silence`
    lost: frozenset[str] = frozenset()  # VMs that peers lost, and whose connections closed
    silent: frozenset[str] = frozenset()  # those of them of which nothing else shows that they live
    explained: frozenset[str] = frozenset()  # those that are unheard because of a loss that was reported
    isolated_since: float | None = None  # most fell silent at once: rather this manager is cut off
    # When a new step of the generation that steps was last reported, or this manager began: a step that is
    # under way then may have just begun.
    stepped_at: float = 0.0
    dropped_at: float | None = None  # when most connections had closed at once
    closed_at: float = 0.0  # when a generation was last closed
    measured: tuple[int, float] = (0, 0.0)  # a generation, and what its newest step took
    no_progress: NoProgress | None = None  # of the open generation, at the last tick
    asked_for_stacks: tuple[int, float] | None = None  # of which generation's members, and when

    def with_last_reports(self, last_reports: Mapping[str, LastReport]) -> Observations:
        """With these last reports, by VM, and the place of each worker in them, for which many rules ask."""
        places = {
            worker.worker: (last_report, number)
            for last_report in last_reports.values()
            for number, worker in enumerate(last_report.report.workers)
        }
        return replace(
            self, last_reports=MappingProxyType(dict(last_reports)), places=MappingProxyType(places)
        )

    def workers_on(self, vm: str) -> Sequence[WorkerReport]:
        """The workers of the VM's newest report; none before it has reported."""
        last_report = self.last_reports.get(vm)
        return last_report.report.workers if last_report is not None else ()

    def report_of(self, incarnation: Incarnation) -> WorkerReport | None:
        """The newest report of exactly this incarnation."""
        last_report, number = self.places.get(incarnation.worker, _NOWHERE)
        report = last_report.report.workers[number] if last_report is not None else None
        return report if report is not None and report.incarnation == incarnation.number else None

    def moved_at(self, *incarnations: Incarnation) -> float:
        """When one of these workers was last seen to make progress, or this manager began to listen."""
        places = [self.places.get(worker, _NOWHERE) for worker, _ in incarnations]
        moved = [last.moved[n] for last, n in places if last is not None and n < len(last.moved)]
        return max([self.started_at, *moved])

    def at_of(self, worker: str) -> At | None:
        """What the worker said it is at; None if it does not say."""
        last_report, number = self.places.get(worker, _NOWHERE)
        progress = last_report.report.progress if last_report is not None else []
        return progress[number].at if number < len(progress) else None

    def measured_s(self, generation: int) -> float:
        """What the newest step of the generation took; 0 if none is known."""
        return self.measured[1] if self.measured[0] == generation else 0.0

    def reconnection_s(self, now: float, timing: Timing) -> float:
        """For how long a VM whose connection closed is expected back, before anything follows from that."""
        dropped = self.dropped_at is not None and now - self.dropped_at < timing.vm_lease_s
        return timing.vm_lease_s if dropped else timing.suspect_grace_s

    def since(self, at: float, now: float) -> float:
        """From when a bound counts that began at `at`.

        What was journalled by an earlier manager counts from when this one began, whichever way the wall
        clock was set between the two.
        """
        return at if self.started_at <= at <= now else self.started_at
