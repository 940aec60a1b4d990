"""The simulated world of a replay: a cloud that follows the trace, and a planner that is asked once."""

from __future__ import annotations

from ...protocol.messages import KEEPS_STEPS, TRAINER_PROTOCOL, Phase, Profile, Profiling
from ...simulator import NodeChange, to_ns
from ..core.commands import (
    Command,
    ComputeGrowth,
    ComputePlan,
    CopyCheckpoint,
    DeleteCheckpoint,
    ExportWeights,
    OpenHead,
    ReleaseVm,
    RequestVm,
    StoreCalibration,
    SweepStore,
)
from ..core.events import (
    Batch,
    HeadOpened,
    JobSubmitted,
    ReportReceived,
    Tick,
    VmTerminated,
    WeightsExported,
)
from ..core.state import vm_of
from ..core.strikes.table import Kind
from ..world import World
from .fleet import GRAPH_HASH, Fleet, NodeVm
from .planner import CachedPlanner
from .policies import Policy
from .scenario import EPOCH_S, TIMING, Scenario
from .training import Training

_TICK_S = 1.0
JOB = "replay"


class TraceWorld(World[None]):
    """One replay. `run` plays it to its end. All times are whole nanoseconds since the trace's start.

    What happens at one instant is decided on together: first all that happens, then one decision on all
    reports and deaths, and, where one of the core's own clocks has run out, one on a tick.
    """

    def __init__(self, scenario: Scenario, policy: Policy, planner: CachedPlanner) -> None:
        super().__init__(TIMING, EPOCH_S)
        self.scenario = scenario
        self.policy = policy
        self.spec = scenario.spec
        self.costs = scenario.costs
        self.planner = planner
        speaks = TRAINER_PROTOCOL if policy.keeps_state else KEEPS_STEPS - 1
        self.fleet = Fleet(scenario.spec.resources.workers_per_node, speaks)
        self.dirty: dict[str, None] = {}
        """VMs that have something to report."""
        self.gone: list[str] = []
        """VMs of whose death the manager is told at this instant."""
        self.training = Training(self, policy)
        self._devices = [scenario.device] * scenario.spec.resources.workers_per_node
        self._asked: ComputePlan | None = None
        self._tick_ns: int | None = None
        self._profiler: str | None = None
        self._profiles = 0  # the newest generation of kind `profile` that trainers are prepared for

    def run(self) -> None:
        """Plays until the trace's time is over, or the job's last step is published."""
        end_ns = self.scenario.end_ns
        self._schedule_trace()
        self.handle(
            JobSubmitted(now=self.now, job=JOB, spec=self.spec.model_dump(mode="json"), bundle_sha256="")
        )
        self._tick_at(0)
        while (at_ns := self.clock.next_ns) is not None and at_ns <= end_ns and self.state.ended is None:
            self.training.pass_time(at_ns)
            while self.clock.next_ns == at_ns:
                self.clock.advance()
            self._settle()
        if self.state.ended is None:
            self.clock.now_ns = end_ns
            self.training.stop(end_ns)

    def _settle(self) -> None:
        """Decide on what happened at this instant."""
        self.training.tell_progress()
        while self.dirty or self.gone:
            living = [vm for name in self.dirty if (vm := self.fleet.vms.get(name)) is not None]
            version = self.state.num_facts
            reports = [
                ReportReceived.model_construct(
                    now=self.clock.shows(at_ns), report=vm.report(at_ns, self._devices, version)
                )
                for vm in living
                for at_ns in (self.training.told_ns(vm),)
            ]
            deaths = [VmTerminated(now=self.now, vm=vm) for vm in self.gone]
            self.dirty, self.gone = {}, []
            self.handle(Batch.model_construct(now=self.now, events=(*reports, *deaths)))
        if self._tick_ns == self.now_ns:
            self._tick_ns = None
            self.handle(Tick.model_construct(now=self.now, new_vms=self._new_vms()))
        self._schedule_tick()
        self.training.explain()

    def _new_vms(self) -> tuple[str, ...]:
        known = len(self.state.vms)
        return tuple(f"vm{known + n}" for n in range(self.spec.resources.max_nodes))

    def _schedule_tick(self) -> None:
        """A real manager ticks every second; here it does when one of the core's clocks runs out."""
        state, observations = self.state, self.observations
        due: list[float] = []
        if state.active and len(state.live_vms) < self.spec.resources.max_nodes:
            failed = state.strikes.of(Kind.REQUEST)
            wait_s = failed.until(TIMING.strikes[Kind.REQUEST]) - self.now if failed.count else 0.0
            due.append(max(_TICK_S, wait_s))
        if (
            observations.usable - observations.planned_for
            and observations.planning is None
            and state.planned is None
        ):
            due.append(observations.grown_at + TIMING.settle_s - self.now)
        due += [until - self.now for until in observations.left_out.values()]
        if state.current is not None:
            until = observations.kept_until or state.current.best_until
            due += [until - self.now] if until is not None else []
        waits_ns = [
            to_ns(wait_s) + 1 for wait_s in due if wait_s > 0
        ]  # past the bound, however it is rounded
        if waits_ns:
            self._tick_at(self.now_ns + min(waits_ns))

    def _tick_at(self, at_ns: int) -> None:
        if self._tick_ns is None or self._tick_ns <= self.now_ns or at_ns < self._tick_ns:
            self._tick_ns = at_ns
            self.at(at_ns, _nothing)

    # ---- commands and orders -------------------------------------------------------------------------------

    def perform(self, command: Command) -> None:
        match command:
            case RequestVm():
                self.fleet.waiting[command.vm] = None
                self._hand_out()
            case ReleaseVm():
                self._release(command.vm)
                self.handle(VmTerminated(now=self.now, vm=command.vm))
            case ComputePlan():
                self._asked = command
                self.after(self.costs.plan_s, self._answer, command)
            case ComputeGrowth():
                raise AssertionError("a replay rents nothing")
            case OpenHead():
                self.after(self.costs.open_s, self._open_head, command.generation)
            case DeleteCheckpoint():
                self.store.retire(command.checkpoint, self.now)
                self.store.delete(command.checkpoint, self.now, lease_s=0.0)
            case ExportWeights():
                self.after(0.0, self._exported, command.checkpoint.step)
            case SweepStore():
                pass  # nothing is left in the store that a replay plays
            case CopyCheckpoint():
                raise AssertionError("a replayed job starts at step 0")
            case StoreCalibration():
                raise AssertionError("a replay begins with a calibration, and measures nothing")

    def _answer(self, command: ComputePlan) -> None:
        if self._asked is command:  # else it was asked about workers that are gone meanwhile
            self.handle(self.policy.answer(self.planner, self.state, command, self.now))

    def _open_head(self, generation: int) -> None:
        self.training.tell_progress()
        self.store.open(generation)
        self.handle(HeadOpened(now=self.now, generation=generation, checkpoints=tuple(self.store.listed)))

    def _exported(self, step: int) -> None:
        self.handle(WeightsExported(now=self.now, uri="", sha256="", step=step))

    def _release(self, name: str) -> None:
        self.fleet.waiting.pop(name, None)
        vm = self.fleet.vms.get(name)
        if vm is not None:
            self.fleet.end(vm, self.now_ns)
            if vm.node not in self.fleet.leaving:
                self.fleet.free[vm.node] = None
                self._hand_out()

    # ---- the cloud -----------------------------------------------------------------------------------------

    def _schedule_trace(self) -> None:
        notice_ns, noticed = to_ns(self.scenario.notice_s), self.scenario.noticed
        goes_ms = self.scenario.removals() if notice_ns else {}
        for index, event in enumerate(self.scenario.trace):
            at_ns = event.time_ms * 1_000_000
            self.at(at_ns, self._come if event.change is NodeChange.ADD else self._go, event.node)
            if index in goes_ms and (noticed is None or event.node in noticed):
                gone_ns = goes_ms[index] * 1_000_000
                self.at(max(at_ns, gone_ns - notice_ns), self._notice, event.node, gone_ns)

    def _come(self, node: str) -> None:
        self.fleet.num_nodes += 1
        self.fleet.free[node] = None
        self._hand_out()

    def _go(self, node: str) -> None:
        self.fleet.num_nodes -= 1
        self.fleet.free.pop(node, None)
        self.fleet.leaving.discard(node)
        vm = self.fleet.by_node.get(node)
        if vm is not None:
            self.training.loses(vm)
            self.fleet.end(vm, self.now_ns)
            self.after(self.costs.detect_s, self._tell_gone, vm.name)

    def _notice(self, node: str, gone_ns: int) -> None:
        self.fleet.leaving.add(node)
        self.fleet.free.pop(node, None)
        vm = self.fleet.by_node.get(node)
        if vm is not None:
            vm.deadline_ns = gone_ns
            if vm.joined:
                self.dirty[vm.name] = None

    def _tell_gone(self, name: str) -> None:
        self.gone.append(name)
        self.training.undetected.discard(name)

    def _hand_out(self) -> None:
        for vm in self.fleet.hand_out(self.now_ns):
            self.after(self.costs.boot_s, self._join, vm)

    # ---- agents and trainers, until they take part ---------------------------------------------------------

    def _join(self, vm: NodeVm) -> None:
        if vm.alive:
            vm.joined = True
            self.dirty[vm.name] = None
            traced_s = self.costs.trace_s if self.state.recipe is not None else 0.0
            self.after(self.costs.start_s + traced_s, self._started, vm)

    def _started(self, vm: NodeVm) -> None:
        if vm.alive:
            for trainer in vm.trainers:
                trainer.phase = Phase.IDLE
            self._traced(vm)

    def _traced(self, vm: NodeVm) -> None:
        if vm.alive:
            for trainer in vm.trainers:
                trainer.graph_hash = GRAPH_HASH if self.state.recipe is not None else None
            self.dirty[vm.name] = None

    def give_orders(self) -> None:
        """Profile, or trace, if that is what is ordered; trainers that have done so see to their own."""
        self._measure()
        self.training.obey()

    def _measure(self) -> None:
        state = self.state
        if state.profile is not None and state.profile.number > self._profiles:
            self._profiles = state.profile.number
            for worker, _ in state.profile.members:
                if (trainer := self.fleet.trainers.get(worker)) is not None:
                    trainer.profiling = Profiling(prepared=self._profiles, endpoint="replayed")
                    self.dirty[vm_of(worker)] = None
        if state.recipe is None and state.profiler is not None and state.profiler.worker != self._profiler:
            self._profiler = state.profiler.worker
            self.after(self.costs.profile_s, self._profiled, self._profiler)
        if state.recipe is not None and self._profiler is not None:
            self._profiler = None
            for vm in self.fleet.vms.values():
                if vm.trainers[0].phase is not Phase.STARTING:
                    self.after(self.costs.trace_s, self._traced, vm)

    def _profiled(self, worker: str) -> None:
        trainer = self.fleet.trainers.get(worker)
        if trainer is not None:
            trainer.profile = Profile(
                recipe=self.scenario.recipe, calibration=self.scenario.calibration.to_json()
            )
            self.dirty[vm_of(worker)] = None


def _nothing() -> None:
    """The instant itself is what matters: the core is asked."""
