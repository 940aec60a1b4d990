"""A simulated world that can be gone on with in several ways: for tests that try all that may happen next.

The real core and the real planner; VMs that die, and join, when a test says so. Messages take no time, and
`step` does one thing at a time, so that a death may come between any two.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any, Self

from core_script import RECIPE, spec
from makara.manager.core import Decision, Timing
from makara.manager.core.commands import Command, ComputePlan, OpenHead, ReleaseVm, RequestVm
from makara.manager.core.events import (
    AttemptSucceeded,
    Batch,
    HeadOpened,
    JobSubmitted,
    ReportReceived,
    Tick,
    VmTerminated,
)
from makara.manager.core.facts import Fact
from makara.manager.core.state import Generation, vm_of
from makara.manager.core.strikes.table import Kind
from makara.manager.service.planning import compute_plan
from makara.manager.world import Clock, Trainer, Vm, World, begin
from makara.morphing import copies_of
from makara.pipeline import Plan, Range
from makara.protocol.messages import CheckpointRef, DeviceInfo, Formed, Phase, Profile, Profiling
from makara.simulator import Calibration, to_ns
from world_checks import check_rung

BOOT_S, FORM_S = 30.0, 5.0


class BranchingWorld(World[None]):
    """A job with VMs of `per_vm` workers. Every generation does one step; the first one's is published."""

    def __init__(self, calibration: Calibration, *, num_vms: int, per_vm: int = 1, **sections: Any) -> None:
        # Between two deaths time passes without steps: no person is asked why VMs are lost.
        super().__init__(Timing().with_row(Kind.LOST_VM, limit=math.inf), epoch_s=1000.0)
        self.calibration, self.per_vm = calibration, per_vm
        self.vms: dict[str, Vm[Trainer]] = {}
        """Those that live."""
        self.requested: list[str] = []
        """Those that the core has asked for and that have not joined."""
        self.facts: list[Fact] = []
        self.rungs: list[str] = []
        """Of the generations that formed."""
        self._due: list[ComputePlan | OpenHead] = []
        self._dirty: dict[str, None] = {}
        self._gone: list[str] = []
        self._forming: Generation | None = None
        self._newest = 0  # the generation that formed last
        self._to_step = 0  # it, if it is about to do its step
        m, num = calibration.microbatch_size, sections["training"]["global_batch_size"]
        cuts = list(range(1, calibration.num_sections))
        self._recipe = RECIPE.model_copy(
            update={"microbatch_size": m, "num_micro_batches": num // m, "cuts": cuts}
        )
        resources = {"max_nodes": num_vms, "workers_per_node": per_vm, **sections.pop("resources", {})}
        job = spec(resources=resources, **sections)
        self.handle(JobSubmitted(now=self.now, job="j", spec=job, bundle_sha256="b0"))
        self.wait(1.0)
        self.join(num_vms)
        self.settle()

    def branch(self) -> Self:
        """This world as it stands, to go on by itself."""
        made = copy(self)
        made.clock = Clock(self.clock.shows(0))
        made.clock.now_ns = self.clock.now_ns
        made.store = replace(self.store, listed=[*self.store.listed], parts={**self.store.parts})
        made.vms = {name: replace(vm, trainers=[*map(replace, vm.trainers)]) for name, vm in self.vms.items()}
        made.facts, made.requested, made.rungs = [*self.facts], [*self.requested], [*self.rungs]
        made._due, made._dirty, made._gone = [*self._due], {**self._dirty}, [*self._gone]
        return made

    # ---- what a test does ----------------------------------------------------------------------------------

    def join(self, count: int) -> None:
        """So many of the VMs that the core has asked for are there, and their trainers are ready."""
        self.clock.now_ns += to_ns(BOOT_S)
        for name in self.requested[:count]:
            self.handle(AttemptSucceeded(now=self.now, vm=name, number=1, id=f"id of {name}"))
            trainers = [Trainer(f"{name}.{index}", phase=Phase.IDLE) for index in range(self.per_vm)]
            self.vms[name] = Vm(name, trainers)
            self._dirty[name] = None
        del self.requested[:count]
        self._obey()

    def kill(self, *vms: str) -> None:
        """They die together; the manager hears of it by the next step."""
        lost = {trainer.worker for vm in vms for trainer in self.vms[vm].trainers}
        current = self.state.current
        members = {worker for worker, _ in current.members} if current is not None else set[str]()
        for vm in vms:
            del self.vms[vm]
            self._gone.append(vm)
        for trainer in self._trainers if members & lost else ():
            if trainer.phase in (Phase.FORMING, Phase.RUNNING):
                trainer.phase = Phase.BROKEN
                self._dirty[vm_of(trainer.worker)] = None

    def wait(self, seconds: float) -> None:
        """Time passes; all VMs report, the core is told of the time, and all that follows happens."""
        self.clock.now_ns += to_ns(seconds)
        self._dirty.update(dict.fromkeys(self.vms))
        self.settle()
        known, spec = len(self.state.vms), self.state.spec
        assert spec is not None, "it was submitted"
        fresh = tuple(f"v{known + n}" for n in range(spec.resources.max_nodes))
        self.handle(Tick(now=self.now, new_vms=fresh))
        self.settle()

    def settle(self) -> None:
        """Until nothing happens any more without time passing."""
        while self.step():
            pass

    def step(self) -> bool:
        """One thing happens: news reach the core, a command is carried out, or a generation forms. False:
        there is nothing to happen."""
        if self._dirty or self._gone:
            deaths = [VmTerminated(now=self.now, vm=vm) for vm in self._gone]
            reports = [self._report(vm) for vm in self._dirty if vm in self.vms]
            self._dirty, self._gone = {}, []
            self.handle(Batch(now=self.now, events=(*reports, *deaths)))
        elif self._due:
            self._carry_out(self._due.pop(0))
        elif self._forming is not None:
            self._form(self._forming)
        elif self._to_step:
            self._do_step(self._to_step)
        else:
            return False
        return True

    # ---- what a test looks at ------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """The least number of VMs that host a section of the plan that runs."""
        generation = self.state.current
        assert generation is not None, "nothing runs"
        return copies_of(
            Plan.from_json(generation.plan), [vm_of(worker) for worker, _ in generation.incarnations]
        )

    @property
    def held(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """{VM: the sections (start, stop) that each of its workers holds}."""
        return {
            name: tuple((t.span.start, t.span.stop) if t.span is not None else (0, 0) for t in vm.trainers)
            for name, vm in self.vms.items()
        }

    # ---- the world -----------------------------------------------------------------------------------------

    def keep(self, decision: Decision) -> None:
        self.facts += decision.facts
        super().keep(decision)

    def perform(self, command: Command) -> None:
        match command:
            case RequestVm():
                self.requested.append(command.vm)
            case ReleaseVm():
                self._gone.append(command.vm)
                self.vms.pop(command.vm, None)
            case ComputePlan() | OpenHead():
                self._due.append(command)
            case _:
                pass  # of the store's housekeeping nothing follows

    def _carry_out(self, command: ComputePlan | OpenHead) -> None:
        if isinstance(command, ComputePlan):
            self.handle(compute_plan(self.state, command, lambda: self.now))
        else:
            self.store.open(command.generation)
            listed = tuple(self.store.listed)
            self.handle(HeadOpened(now=self.now, generation=command.generation, checkpoints=listed))

    @property
    def _trainers(self) -> list[Trainer]:
        return [trainer for vm in self.vms.values() for trainer in vm.trainers]

    def _report(self, name: str) -> ReportReceived:
        device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 30)
        vm = self.vms[name]
        report = vm.report(self.now_ns, [device] * self.per_vm, self.state.num_facts)
        return ReportReceived.model_construct(now=self.now, report=report)

    def give_orders(self) -> None:
        self._obey()

    def _obey(self) -> None:
        """Trainers do what the core's state says: profile, trace, prepare, leave, and go."""
        state, trainers = self.state, {trainer.worker: trainer for trainer in self._trainers}
        for trainer in trainers.values():
            if state.recipe is not None and trainer.graph_hash is None:
                self._changed(trainer, graph_hash=RECIPE.graph_hash)
            if trainer.phase in (Phase.FORMING, Phase.RUNNING) and trainer.generation <= state.abandoned:
                self._changed(trainer, phase=Phase.BROKEN)
        if state.profile is not None:
            self._profile(state.profile, trainers)
        if state.planned is not None:
            for worker, _ in state.planned.members:
                if worker in trainers and trainers[worker].prepared < state.planned.number:
                    self._changed(trainers[worker], prepared=state.planned.number)
        current = state.current
        if (
            current is None
            or current.formed is not None
            or any(w not in trainers for w, _ in current.members)
        ):
            self._forming = None
        elif self._forming is None or self._forming.number != current.number:
            self._forming = current
            for worker, _ in current.members:
                self._changed(trainers[worker], phase=Phase.FORMING, generation=current.number)

    def _profile(self, profile: Generation, trainers: dict[str, Trainer]) -> None:
        for worker, _ in profile.members:
            trainer = trainers[worker]
            if trainer.profiling is None or trainer.profiling.prepared < profile.number:
                self._changed(trainer, profiling=Profiling(prepared=profile.number, endpoint="here"))
        first = trainers[profile.members[0][0]]
        if profile.opened_at is not None and first.profile is None:
            self._changed(first, profile=Profile(recipe=self._recipe, calibration=self.calibration.to_json()))

    def _changed(self, trainer: Trainer, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(trainer, name, value)
        self._dirty[vm_of(trainer.worker)] = None

    def _form(self, generation: Generation) -> None:
        """All members agree on where they begin, load what they lack, and do one step."""
        self._forming = None
        trainers = {trainer.worker: trainer for trainer in self._trainers}
        members = [trainers[worker] for worker, _ in generation.members]
        begun = begin(members, generation.checkpoints, self.calibration.num_sections)
        hosts = [trainer for trainer in trainers.values() if trainer.agreed_in == self._newest]
        check_rung(begun, members, hosts, self.calibration.num_sections)
        self.clock.now_ns += to_ns(FORM_S)
        number, ranges = generation.number, generation.plan["ranges"]
        formed = Formed(generation=number, step=begun.step, rung=begun.rung, phases_s={"load": FORM_S})
        for rank, trainer in enumerate(members):
            if rank < len(ranges):
                trainer.take_part(Range(*ranges[rank]), begun.branch, formed)
            else:
                trainer.leave()
            self._dirty[vm_of(trainer.worker)] = None
        self._to_step = self._newest = number
        self.rungs.append(begun.rung)

    def _do_step(self, number: int) -> None:
        """A step of the generation, if nobody has left it; its checkpoint is published if it is the first."""
        self._to_step = 0
        current = self.state.current
        workers = [t for t in self._trainers if t.generation == number and t.phase is Phase.RUNNING]
        if current is None or current.number != number or len(workers) < len(current.incarnations):
            return
        for trainer in workers:
            trainer.commit(number)
            self._dirty[vm_of(trainer.worker)] = None
        first = CheckpointRef(step=workers[0].step, generation=number)
        if not self.store.listed and self.store.publish(first, None):
            next(t for t in workers if t.worker == current.incarnations[0].worker).published = first
