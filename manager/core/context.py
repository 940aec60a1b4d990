"""One decision in the making: the state as the rules change it, and what they want recorded and done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ...protocol.messages import INCARNATIONS, Phase, WorkerReport
from ..spec.job_spec import JobSpec
from ..spec.resources import CLOUDS
from .commands import Command, ReleaseVm
from .events import Event
from .facts import EndReason, Fact, GenerationClosed, VmEnded
from .fold import apply
from .observations import LastReport, Observations
from .state import Incarnation, JobState, vm_of
from .strikes.of_context import StrikesInDecision
from .strikes.table import Kind
from .timing import Timing
from .vms import Vm, VmStatus


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be journalled (`facts`) and done (`commands`), and what is now known."""

    facts: tuple[Fact, ...]
    commands: tuple[Command, ...]
    observations: Observations
    state: JobState  # with the facts applied


class _Heard(NamedTuple):
    """The newest reports of workers on live VMs, and the VMs and last reports that they are of."""

    vms: Mapping[str, Vm]
    last_reports: Mapping[str, LastReport]
    reports: Sequence[tuple[Vm, WorkerReport]]
    deaths: Sequence[tuple[Vm, WorkerReport]]


class Context(StrikesInDecision):
    """The workplace of the rules while one event is decided. `fact` applies at once; later rules see it."""

    def __init__(self, state: JobState, observations: Observations, event: Event, timing: Timing) -> None:
        self.state = state
        self.observations = observations
        self.event = event
        self.timing = timing
        self.now = event.now
        self._facts: list[Fact] = []
        self._commands: list[Command] = []
        self._known: _Heard | None = None

    def fact(self, fact: Fact) -> None:
        self._facts.append(fact)
        self.state = apply(self.state, fact)

    def command(self, command: Command) -> None:
        self._commands.append(command.model_copy(update={"ordered_after": self.state.num_facts}))

    def note(self, **observed: Any) -> None:
        """Keep these fields of the observations; without a change nothing is copied."""
        if any(getattr(self.observations, name) != value for name, value in observed.items()):
            self.observations = replace(self.observations, **observed)

    def decision(self) -> Decision:
        return Decision(tuple(self._facts), tuple(self._commands), self.observations, self.state)

    # ---- what is ------------------------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        """The job file. Only a job that was submitted has one; rules are about no others."""
        assert self.state.spec is not None, "no job was submitted"
        return self.state.spec

    def reports(self) -> Sequence[tuple[Vm, WorkerReport]]:
        """The newest report of each worker on a live VM, in the order in which VMs were requested."""
        return self._heard().reports

    def deaths(self) -> Sequence[tuple[Vm, WorkerReport]]:
        """The last reports of earlier incarnations, oldest first, as long as their agents tell of them."""
        return self._heard().deaths

    def report_of(self, incarnation: Incarnation) -> WorkerReport | None:
        """The newest report of exactly this incarnation."""
        return self.observations.report_of(incarnation)

    def reports_of(self, incarnations: Iterable[Incarnation]) -> list[WorkerReport]:
        """The newest reports of exactly these, without those that have not reported."""
        reports = map(self.observations.report_of, incarnations)
        return [report for report in reports if report is not None]

    def _heard(self) -> _Heard:
        """Cached until VMs or last reports change, because many rules ask."""
        vms, last_reports = self.state.vms, self.observations.last_reports
        if self._known is None or self._known.vms is not vms or self._known.last_reports is not last_reports:
            heard = [
                (vm, last_report.report)
                for vm in self.state.live_vms
                if (last_report := last_reports.get(vm.vm)) is not None
            ]
            reports = [(vm, worker) for vm, report in heard for worker in report.workers]
            deaths = [(vm, worker) for vm, report in heard for worker in report.deaths]
            self._known = _Heard(vms, last_reports, reports, deaths)
        return self._known

    def must_save(self) -> bool:
        """Whether a job that is to stop has steps that only its workers hold, and no generation to save them.

        Its workers form one more generation, if any plan allows it, and hold there: now, or once trainers
        that are starting have joined them. A worker not yet heard after a manager's restart may hold steps.
        """
        state = self.state
        if state.stop_ordered_at is None or state.finished is not None or state.current is not None:
            return False
        if self.stop_is_late() or (state.impossible is not None and not self._more_may_come()):
            return False
        return self.held_step() > state.saved_step or (
            state.opened_generation > 0 and bool(self.awaited(vm.vm for vm in state.live_vms))
        )

    def _more_may_come(self) -> bool:
        """Whether VMs that have joined may yet have ready workers that the planner was not asked about."""
        unfit, asked = self.state.unfit, self.observations.planned_for
        heard = {vm.vm for vm, _ in self.reports()}
        if any(vm.joined and vm.vm not in heard for vm in self.state.live_vms):
            return True
        workers = [w for vm, w in self.reports() if vm.joined and w.worker not in unfit]
        return any(has_ended(worker) or incarnation_of(worker) not in asked for worker in workers)

    def held_step(self) -> int:
        """The newest step that a living worker of a generation reports; 0 if none does."""
        return max((worker.step for worker in self._holders()), default=0)

    def stop_is_late(self) -> bool:
        """Whether a job was told to stop long ago and made no progress since: it is ended as it is."""
        ordered_at = self.state.stop_ordered_at
        return ordered_at is not None and self.save_is_late(ordered_at)

    def save_is_late(self, ordered_at: float) -> bool:
        """Whether workers were told long ago to save and to stop, and made no progress since.

        While this manager is isolated, they may save unseen for as long as their agents wait. Changing the
        generation again and again does not count as progress.
        """
        bound_s = self.timing.stop_timeout_s
        if self.isolated:
            bound_s = max(bound_s, self.timing.given_up_after_s)
        if self.elapsed_s(ordered_at) <= bound_s:
            return False
        closed = [g for g in self.state.history if g.ended_at is not None and g.ended_at >= ordered_at]
        if len(closed) >= self.timing.max_stop_changes:
            return True
        current = self.state.current
        members = current.members if current is not None else map(incarnation_of, self._holders())
        return self.now - self.observations.moved_at(*members) > bound_s

    def _holders(self) -> list[WorkerReport]:
        """Workers that may hold steps, with or without a generation in which they can save them."""
        living = [worker for _, worker in self.reports() if worker.generation > 0 and not has_ended(worker)]
        return [worker for worker in living if not self.is_dead(incarnation_of(worker))]

    def dead(self, incarnations: Iterable[Incarnation]) -> list[Incarnation]:
        """The dead among `incarnations`. Those that a report shows alive are skipped at once: rules ask this
        several times in a decision, of a thousand workers."""
        return [
            incarnation
            for incarnation in incarnations
            if not self._is_shown_alive(incarnation) and self.is_dead(incarnation)
        ]

    def _is_shown_alive(self, incarnation: Incarnation) -> bool:
        report, worker = self.report_of(incarnation), incarnation.worker
        is_live = vm_of(worker) in self.state.vms.live
        return is_live and report is not None and not has_ended(report) and worker not in self.state.failed

    def is_dead(self, incarnation: Incarnation) -> bool:
        """Whether the trainer is known to be gone. Silence alone, or a report of its past, is no proof."""
        worker, number = incarnation
        vm = self.state.vms.get(vm_of(worker))
        if vm is None or not vm.live or self.state.has_failed(incarnation):
            return True
        return any(
            other.incarnation > number or (other.incarnation == number and has_ended(other))
            for other in self.observations.workers_on(vm.vm)
            if other.worker == worker
        )

    def elapsed_s(self, at: float) -> float:
        """Seconds since `at`, except those in which this manager did not run; see `Observations.since`."""
        return self.now - self.observations.since(at, self.now)

    @property
    def isolated(self) -> bool:
        """Whether this manager seems to be cut off from its VMs: nothing is concluded from silence."""
        return self.observations.isolated_since is not None

    @property
    def fenced_off(self) -> bool:
        """Whether the head takes no checkpoint of the open generation any more: it was swapped for one that
        never opened, or by another manager."""
        current, head = self.state.current, self.state.head_generation
        if current is None:
            return False
        reports = self.reports_of(current.incarnations)
        return head > current.number or any(worker.fenced == current.number for worker in reports)

    def silent(self, incarnations: Iterable[Incarnation]) -> list[Incarnation]:
        """The workers on VMs of which nothing shows that they live; none while this manager is isolated."""
        return self._on(incarnations, self.observations.silent)

    def unheard(self, incarnations: Iterable[Incarnation]) -> list[Incarnation]:
        """The workers that can be told nothing: those on VMs that send no reports."""
        return self._on(incarnations, self.observations.unheard)

    def _on(self, incarnations: Iterable[Incarnation], vms: frozenset[str]) -> list[Incarnation]:
        if self.isolated or not vms:
            return []
        return [incarnation for incarnation in incarnations if vm_of(incarnation.worker) in vms]

    def noticed(self, incarnations: Iterable[Incarnation]) -> list[Incarnation]:
        """The workers on VMs that the cloud will take."""
        vms = {vm.vm for vm in self.state.live_vms if vm.status is VmStatus.NOTICED}
        return [incarnation for incarnation in incarnations if vm_of(incarnation.worker) in vms]

    def awaited(self, vms: Iterable[str]) -> list[str]:
        """The VMs among `vms` that have not reported since this manager began to listen, as after a restart,
        and whose leases still run."""
        state, observations = self.state, self.observations
        return [
            vm
            for vm in vms
            if (
                (last_report := observations.last_reports.get(vm)) is None
                or last_report.at < observations.started_at
            )
            and state.vms[vm].joined
            and (self.isolated or vm not in observations.unheard)
        ]

    def reconnection_s(self) -> float:
        """As `Observations.reconnection_s`, at this moment."""
        return self.observations.reconnection_s(self.now, self.timing)

    def is_away(self, incarnation: Incarnation) -> bool:
        """Whether the worker is dead, or its VM is not heard."""
        return vm_of(incarnation.worker) in self.observations.unheard or self.is_dead(incarnation)

    def is_left_out(self, incarnation: Incarnation) -> bool:
        """Whether plans do without the worker for a while."""
        return self.observations.left_out.get(incarnation, self.now) > self.now

    def has_joined(self, vm: Vm) -> bool:
        """Whether the VM ever reported; its first report may belong to the event that is being decided."""
        return vm.joined or vm.vm in self.observations.last_reports

    # ---- what several rules do ----------------------------------------------------------------------------

    def end_vm(
        self,
        vm: str,
        reason: EndReason,
        detail: str = "",
        *,
        gone: bool = False,
        taken: bool = False,
        ran_s: float | None = None,
    ) -> None:
        """The VM is no longer part of the job; it is released, unless the provider says that it is `gone`
        (`ran_s`: and for how long it existed). `taken`: its cloud says that it took it.

        Disks and addresses that a cloud leaves behind when a VM is gone are released as well.
        """
        attempt, never_joined = self.state.vms[vm].attempt, self.state.never_joined
        ended = VmEnded(at=self.now, vm=vm, reason=reason, detail=detail, gone=gone, ran_s=ran_s)
        self.fact(ended.model_copy(update=self._loss(self.state.vms[vm], reason, taken=taken)))
        if not gone or (attempt is not None and attempt.placement.provider in CLOUDS):
            # Once too many VMs in a row did not join, a person is asked why, and the last one's console may
            # tell.
            is_one_more = self.state.never_joined > never_joined
            console = is_one_more and self.row(Kind.NOT_JOINED).is_reached(self.state.never_joined)
            self.command(ReleaseVm(key=f"{vm}/release", vm=vm, console=console))

    @property
    def highest_step(self) -> int:
        """The job's newest step, as far as it was heard or journalled."""
        return max(self.observations.newest_step, self.state.progress_step)

    def _loss(self, vm: Vm, reason: EndReason, *, taken: bool) -> dict[str, int]:
        """`VmEnded.lost_at` or `taken_at`, if this is the loss of a VM that had joined.

        Whatever its workers were last heard to do: the job's code may end a machine while it is imported,
        traced or measured, and a trainer may be seen to end before its machine. Where its cloud says that it
        took the VM, or gave notice, nothing that runs there was the cause.
        """
        is_cloud = vm.attempt is not None and vm.attempt.placement.provider in CLOUDS
        is_noticed = is_cloud and vm.deadline is not None
        is_lost = reason in _LOST or (
            is_noticed and reason is EndReason.RELEASED
        )  # let go before it is taken
        has_ended_itself = vm.must_end_by is not None and vm.must_end_by <= self.now  # for want of a manager
        if not is_lost or has_ended_itself or not self.has_joined(vm):
            return {}
        if not is_noticed and not (is_cloud and taken):
            return {"lost_at": self.highest_step}
        stepped = vm.joined and (vm.joined_step is None or self.highest_step > vm.joined_step)
        return {} if stepped else {"taken_at": self.highest_step}

    def close_generations(self, reason: str) -> None:
        """Close the open generation and the one being prepared."""
        self.note(closed_at=self.now)
        current = self.state.current
        if current is not None:
            self.fact(GenerationClosed(at=self.now, number=current.number, reason=reason))
        self.close_planned(reason)

    def close_planned(self, reason: str) -> None:
        """Give up the generation that is being prepared, if one is."""
        planned = self.state.planned
        if planned is not None:
            self.fact(GenerationClosed(at=self.now, number=planned.number, reason=reason))

    def leave_out(self, incarnations: Iterable[Incarnation], for_s: float | None = None) -> None:
        """Plan without these for a while."""
        until = self.now + (self.timing.left_out_s if for_s is None else for_s)
        left_out = {worker: end for worker, end in self.observations.left_out.items() if end > self.now}
        left_out.update(dict.fromkeys(incarnations, until))
        self.note(left_out=MappingProxyType(left_out))


_LOST = (EndReason.PREEMPTED, EndReason.LEASE_EXPIRED, EndReason.LEFT)


def has_ended(worker: WorkerReport) -> bool:
    return worker.phase is Phase.EXITED or worker.failure is not None


def never_ran(worker: WorkerReport) -> bool:
    """Whether its agent has not started a trainer yet."""
    return worker.incarnation % INCARNATIONS == 0


def incarnation_of(worker: WorkerReport) -> Incarnation:
    return Incarnation(worker.worker, worker.incarnation)


def own_steps(worker: WorkerReport) -> int:
    """How many steps the worker has committed in its newest generation."""
    formed = worker.formed
    if formed is None or formed.generation != worker.generation:
        return 0
    return max(0, worker.step - formed.step)
