"""A hand-driven core: tests say what VMs report and look at the facts and commands that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from calibrations import uniform
from makara.manager.core import Decision, Observations, Timing, decide
from makara.manager.core.commands import Command, ComputePlan, OpenHead, ReleaseVm, RequestVm
from makara.manager.core.events import (
    AttemptFailed,
    Event,
    HeadOpened,
    JobSubmitted,
    PlanComputed,
    ReportReceived,
    Tick,
    VmTerminated,
)
from makara.manager.core.facts import Fact, GenerationKind, GenerationPlanned, RefusalKind
from makara.manager.core.fold import fold
from makara.manager.core.pools.shares import Share
from makara.manager.core.state import JobState
from makara.pipeline import Range, grid
from makara.protocol.messages import (
    CheckpointRef,
    DeviceInfo,
    Formed,
    Phase,
    Profile,
    Recipe,
    Report,
    WorkerReport,
)

RECIPE = Recipe(
    microbatch_size=2,
    num_micro_batches=4,
    cuts=[1],
    graph_hash="5ec7",
    threads=1,
    device_kind="cpu",
    torch_version="2.13",
    bundle_sha256="b0",
)
MEMORY = 1 << 30
T = TypeVar("T")


def spec(**changes: dict[str, Any]) -> dict[str, Any]:
    """A valid submission; `changes` are merged into its sections."""
    value: dict[str, dict[str, Any] | str] = {
        "name": "scripted",
        "entrypoint": "train:build",
        "resources": {"provider": "local", "max_nodes": 2},
        "training": {"global_batch_size": 8, "steps": 100},
        "checkpoint": {"uri": "file:///c", "interval": 10, "keep_latest_k": 2},
        "retry": {"max_restarts_on_errors": 1},
    }
    for section, fields in changes.items():
        before = value.get(section, {})
        assert isinstance(before, dict)
        value[section] = {**before, **fields}
    return value


def plan_json(depth: int, replicas: int) -> dict[str, Any]:
    stages = [Range(0, 2)] if depth == 1 else [Range(0, 1), Range(1, 2)]
    return grid(stages, replicas, 4).to_json()


@dataclass
class Script:
    """State, observations and all facts and commands so far. Time stands still unless `wait` moves it.

    What is released is gone at once, unless the provider is not `releasing`.
    """

    timing: Timing = field(default_factory=Timing)
    now: float = 100.0
    state: JobState = field(default_factory=JobState)
    observations: Observations = field(default_factory=Observations)
    facts: list[Fact] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    workers: dict[str, WorkerReport] = field(default_factory=dict)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    releasing: bool = True
    share: Share = field(default_factory=Share)
    """Of pools of VMs that other jobs want, too."""
    halves: bool = False
    """Whether its plans have them; I and W of a section take 1.5 s each."""
    predicted_s: float | None = None
    """What its planner predicts of every plan, where nothing else is said."""
    _sequence: int = 0
    _ids: int = 0

    def event(self, event: Event) -> Decision:
        decision = decide(self.state, self.observations, event, self.timing)
        self.facts += decision.facts
        self.commands += decision.commands
        told = fold(self.facts) if decision.facts else self.state  # without a fact it stays as it was
        assert decision.state == told
        self.state, self.observations = decision.state, decision.observations
        for command in decision.commands if self.releasing else ():
            if isinstance(command, ReleaseVm):
                self.event(VmTerminated(now=self.now, vm=command.vm))
        return decision

    def submit(self, **changes: dict[str, Any]) -> None:
        self.event(JobSubmitted(now=self.now, job="j", spec=spec(**changes), bundle_sha256="b0"))

    def wait(self, seconds: float = 0.0) -> Decision:
        self.now += seconds
        ids = tuple(f"v{self._ids + n}" for n in range(4))
        self._ids += 4
        return self.event(Tick(now=self.now, new_vms=ids, share=self.share))

    def report(self, *changes: WorkerReport, silent: tuple[str, ...] = ()) -> list[Fact]:
        """Every known worker's VM reports, with these workers as given; returns the facts that follow."""
        before = len(self.facts)
        for worker in changes:
            self.workers[worker.worker] = worker
        for vm in sorted({name.rpartition(".")[0] for name in self.workers}):
            if vm not in silent:
                self.event(ReportReceived(now=self.now, report=self._report(vm)))
        return self.facts[before:]

    def _report(self, vm: str) -> Report:
        self._sequence += 1
        workers = [worker for name, worker in self.workers.items() if name.rpartition(".")[0] == vm]
        return Report(
            vm=vm,
            sequence=self._sequence,
            orders_version=self.state.num_facts,
            address="10.0.0.1",
            devices=[
                DeviceInfo(kind="cpu", name=f"cpu{n}", memory_bytes=MEMORY) for n in range(len(workers))
            ],
            workers=workers,
            **self.extra.get(vm, {}),
        )

    def change(self, worker: str, **fields: Any) -> WorkerReport:
        return self.workers[worker].model_copy(update=fields)

    def last(self, kind: type[T]) -> T:
        return next(value for value in reversed([*self.facts, *self.commands]) if isinstance(value, kind))

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(value, kind) for value in [*self.facts, *self.commands])

    @property
    def num_plans(self) -> int:
        """Generations that were planned to train."""
        planned = (fact for fact in self.facts if isinstance(fact, GenerationPlanned))
        return sum(fact.kind is GenerationKind.TRAIN for fact in planned)

    # ---- whole stretches of a job -------------------------------------------------------------------------

    def start(self, num_vms: int = 2, **changes: dict[str, Any]) -> list[str]:
        """Submitted, VMs joined, profiled, generation 1 planned; returns the workers in rank order."""
        self.submit(**{"resources": {"max_nodes": num_vms}, **changes})
        self.wait()
        workers = [f"{vm}.0" for vm in self.state.vms][:num_vms]
        self.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
        profile = Profile(recipe=RECIPE, calibration=uniform(2, **self._halves_s()).to_json())
        self.report(self.change(workers[0], profile=profile))
        self.report(*(self.change(w, graph_hash="5ec7") for w in workers))
        if not self.count(ComputePlan):
            self.wait(5.0)  # the last of the VMs did not come; the others are no longer held up
        self.answer(*((2, num_vms // 2) if num_vms > 1 else (1, 1)))
        return workers

    def _halves_s(self) -> dict[str, tuple[float, ...]]:
        return {"input_s": (1.5, 1.5), "weight_s": (1.5, 1.5)} if self.halves else {}

    def answer(
        self, depth: int, replicas: int, *, predicted_s: float | None = None, stays: bool = False
    ) -> None:
        """The planner's answer to its newest question, with the first workers asked about."""
        asked = self.last(ComputePlan)
        workers = tuple(slot.worker for slot in asked.workers)[: depth * replicas]
        plan = {**plan_json(depth, replicas), "generation": asked.generation, "halves": self.halves}
        self.event(
            PlanComputed(
                now=self.now,
                generation=asked.generation,
                asked=asked.asked,
                plan=plan,
                workers=workers,
                predicted_s=self.predicted_s if predicted_s is None else predicted_s,
                stays=stays,
            )
        )

    def answer_impossible(self, reason: str) -> None:
        """The planner's answer to its newest question: no plan can run."""
        asked = self.last(ComputePlan)
        self.event(
            PlanComputed(
                now=self.now, generation=asked.generation, asked=asked.asked, plan=None, reason=reason
            )
        )

    def refuse(self, vm: str | None = None) -> None:
        """The provider has no capacity for this VM, or for the one that was asked for last."""
        vm = vm or self.last(RequestVm).vm
        kind, error = RefusalKind.NO_CAPACITY, "no capacity"
        self.event(AttemptFailed(now=self.now, vm=vm, number=1, kind=kind, error=error))

    def prepare(self) -> None:
        planned = self.state.planned
        assert planned is not None
        changes = [
            self.change(w, prepared=planned.number, endpoint=f"10.0.0.1:{planned.number}")
            for w, _ in planned.members
        ]
        self.report(*changes)

    def open(self, *checkpoints: CheckpointRef) -> None:
        generation = self.last(OpenHead).generation
        self.event(HeadOpened(now=self.now, generation=generation, checkpoints=checkpoints))

    def form(
        self, step: int = 0, load_s: float = 0.5, rung: Literal["start", "peers", "store"] = "start"
    ) -> None:
        current = self.state.current
        assert current is not None
        formed = Formed(generation=current.number, step=step, rung=rung, phases_s={"load": load_s})
        running = {
            "phase": Phase.RUNNING,
            "generation": current.number,
            "formed": formed,
            "step": step,
            "lost": [],
        }
        self.report(*(self.change(w, **running) for w, _ in current.incarnations))

    def run(self, num_vms: int = 2, **changes: dict[str, Any]) -> list[str]:
        """A job whose generation 1 runs on all VMs."""
        workers = self.start(num_vms, **changes)
        self.prepare()
        self.open()
        self.form()
        return workers
