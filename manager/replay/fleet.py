"""The simulated machines: what the cloud has, which VMs were made of it, and the trainers on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...morphing import MemberState
from ...pipeline import Range
from ...protocol.messages import (
    CheckpointRef,
    DeviceInfo,
    Formed,
    Phase,
    Profile,
    Profiling,
    Report,
    WorkerReport,
)
from ..core.events import ReportReceived

GRAPH_HASH = "replayed"
NOTHING = MemberState(None, None, None, frozenset())


@dataclass(eq=False, slots=True)
class Trainer:
    """One worker. A trainer of the replay never fails by itself, so it has one incarnation."""

    worker: str
    phase: Phase = Phase.STARTING
    generation: int = 0
    prepared: int = 0
    traced: bool = False
    step: int = 0
    span: Range | None = None
    """The sections that it holds, as of `step`; None: none."""
    branch: int = 0
    """The generation whose commit went into them last."""
    agreed_in: int = 0
    """The generation that formed with them last."""
    formed: Formed | None = None
    published: CheckpointRef | None = None
    profiling: Profiling | None = None
    profile: Profile | None = None

    def standing(self) -> MemberState:
        """What it holds, as the others are told when a generation forms."""
        if self.span is None:
            return NOTHING
        sections = frozenset(self.span.sections)
        return MemberState(self.step, None, None, sections, branch=self.branch, agreed_in=self.agreed_in)

    def report(self) -> WorkerReport:
        return _BLANK.model_copy(
            update={
                "worker": self.worker,
                "phase": self.phase,
                "generation": self.generation,
                "prepared": self.prepared,
                "endpoint": f"replayed:{self.prepared}" if self.prepared else None,
                "graph_hash": GRAPH_HASH if self.traced else None,
                "step": self.step,
                "formed": self.formed,
                "published": self.published,
                "profiling": self.profiling,
                "profile": self.profile,
            }
        )


_BLANK = WorkerReport(worker="", incarnation=1, phase=Phase.STARTING)  # copied thousands of times, unchecked


@dataclass(eq=False, slots=True)
class SimVm:
    """A VM with its agent and its trainers."""

    vm: str
    node: str
    began_ns: int
    trainers: tuple[Trainer, ...]
    alive: bool = True
    joined: bool = False
    ended_ns: int | None = None
    deadline_ns: int | None = None
    sequence: int = 0

    def event(self, now_ns: int, now: float, device: DeviceInfo, version: int) -> ReportReceived:
        """Its newest report."""
        self.sequence += 1
        left_s = None if self.deadline_ns is None else max(0, self.deadline_ns - now_ns) / 1e9
        report = Report(
            vm=self.vm,
            sequence=self.sequence,
            orders_version=version,
            address="replayed",
            devices=[device] * len(self.trainers),
            workers=[trainer.report() for trainer in self.trainers],
            metrics=[],
            notice_deadline_s=left_s,
            leaving=None,
        )
        return ReportReceived(now=now, report=report)


@dataclass(eq=False)
class Fleet:
    """The cloud's nodes and the job's VMs. A request waits, in order, until there is a node for it."""

    workers_per_vm: int
    free: dict[str, None] = field(default_factory=dict[str, None])
    """Nodes that nobody has, in the order in which they came."""
    waiting: dict[str, None] = field(default_factory=dict[str, None])
    """Requested VMs that have no node yet, oldest first."""
    leaving: set[str] = field(default_factory=set[str])
    """Nodes that the cloud has said it will take: they are given to nobody."""
    vms: dict[str, SimVm] = field(default_factory=dict[str, SimVm])
    """Living VMs."""
    by_node: dict[str, SimVm] = field(default_factory=dict[str, SimVm])
    trainers: dict[str, Trainer] = field(default_factory=dict[str, Trainer])
    """Trainers of living VMs, by worker."""
    num_nodes: int = 0
    """Nodes that there are, the job's included."""
    billed_ns: int = 0
    """Of VMs that ended."""

    def hand_out(self, now_ns: int) -> list[SimVm]:
        """VMs made of free nodes for the requests that wait."""
        made: list[SimVm] = []
        while self.waiting and self.free:
            name, node = next(iter(self.waiting)), next(iter(self.free))
            del self.waiting[name], self.free[node]
            trainers = tuple(Trainer(f"{name}.{index}") for index in range(self.workers_per_vm))
            vm = SimVm(name, node, now_ns, trainers)
            self.vms[name] = self.by_node[node] = vm
            self.trainers.update((trainer.worker, trainer) for trainer in trainers)
            made.append(vm)
        return made

    def end(self, vm: SimVm, now_ns: int) -> None:
        """The VM is gone, or was given back; from now on it costs nothing."""
        vm.alive, vm.ended_ns = False, now_ns
        self.billed_ns += now_ns - vm.began_ns
        del self.vms[vm.vm], self.by_node[vm.node]
        for trainer in vm.trainers:
            del self.trainers[trainer.worker]

    def vm_ns(self, now_ns: int) -> int:
        """The VMs' time until now, in all."""
        return self.billed_ns + sum(now_ns - vm.began_ns for vm in self.vms.values())
