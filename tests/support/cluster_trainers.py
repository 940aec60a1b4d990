"""What simulated VMs and trainers are, for `cluster.py`; what they do is in `cluster_protocol.py`.

A trainer's weights are stood for by their *lineage*: the generation that committed each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from calibrations import measured, uniform
from makara.morphing import MemberState, Record
from makara.protocol.messages import (
    CheckpointRef,
    DeviceInfo,
    Failure,
    Formed,
    GenerationOrder,
    Orders,
    Phase,
    Profile,
    Profiling,
    Recipe,
    Report,
    WorkerReport,
)
from makara.protocol.survey import Layout, SectionRow, Survey, Timed
from makara.simulator import Wire
from makara.simulator.calibration.assembly import measurements_of, profile_of
from makara.simulator.calibration.statistics import Figure

GRAPH_HASH = "5ec7"
RECIPE = Recipe(
    microbatch_size=2,
    num_micro_batches=4,
    cuts=[1, 2],
    graph_hash=GRAPH_HASH,
    threads=1,
    device_kind="cpu",
    torch_version="2.13",
    bundle_sha256="b0",
)
CALIBRATION = uniform(3, microbatch_size=2)
PROFILE = Profile(recipe=RECIPE, calibration=CALIBRATION.to_json())
LAYOUTS = [
    Layout(
        microbatch_size=m,
        graph_hash=GRAPH_HASH,
        cuts=RECIPE.cuts,
        cut_bytes=[4, 4],
        grad_cut_bytes=[3, 3],
        labels=[],
    )
    for m in (1, 2)
]


def row(m: int, section: int) -> SectionRow:
    """What a trainer measures of a section."""
    timed = Timed(median=1.0, spread=0.1, repeats=3, dropped=0)
    names = ("parameter_bytes", "gradient_bytes", "state_bytes", "activation_bytes")
    return SectionRow(
        microbatch_size=m,
        section=section,
        times=dict.fromkeys(("forward_s", "backward_s", "optimizer_s"), timed),
        sizes=dict.fromkeys(names, 10),
        seconds=0.5,
    )


WIRE = Wire(
    same_vm=False,
    latency_s=Figure(1e-4, 1e-6, 9, 0),
    bytes_per_s=Figure(1e9, 1e6, 9, 0),
    loaded=True,
    source="workers",
).to_json()
BASIS = measured(CALIBRATION, GRAPH_HASH).basis
assert BASIS is not None
SURVEY = Survey(
    basis=BASIS.to_json(),
    recipe=RECIPE,
    layouts=LAYOUTS,
    rows=[row(2, 1)],
    executor={},
    wires=[{**WIRE, "source": "loopback"}],
    seconds=1.0,
)
DEVICES = [DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 30)]


def measured_profile(*, links: bool) -> Profile:
    """What a generation of kind `profile` finds; of one member, links are assumed."""
    wires = [Wire.from_json(WIRE, "")] if links else []
    rows = [row(m, section) for m in (1, 2) for section in range(3)]
    found = measurements_of(SURVEY, rows, wires, [])
    return profile_of(found, RECIPE, wanted=None, memory_bytes=1 << 30, most_workers=2)


@dataclass(eq=False)
class Trainer:
    """One incarnation of one worker."""

    worker: str
    vm: SimVm
    incarnation: int = 1
    phase: Phase = Phase.STARTING
    generation: int = 0
    prepared: int = 0
    lineage: tuple[int, ...] | None = None
    branch: int = 0  # the generation whose commit the lineage ends with, or of the checkpoint that it is from
    agreed_in: int = 0  # the generation in which the lineage was last agreed on
    record: Record | None = None  # of the newest commit that it saw
    reduced_in: int = 0  # the generation of gradients that it holds for the step after the lineage; 0: none
    sections: frozenset[int] = frozenset()
    formed: Formed | None = None
    lost: tuple[str, ...] = ()
    published: CheckpointRef | None = None
    failure: Failure | None = None
    profiling: Profiling = field(default_factory=Profiling)
    profile: Profile | None = None
    graph_hash: str | None = None
    go: GenerationOrder | None = None
    hold: bool = False
    stopped: bool = False
    alive: bool = True

    @property
    def step(self) -> int:
        return len(self.lineage or ())

    def commit(self, generation: int) -> None:
        """Take a step."""
        self.lineage = (*(self.lineage or ()), generation)
        self.branch, self.reduced_in = generation, 0
        self.record = Record(step=self.step, attempt=0, voters=0, generation=generation)

    def standing(self) -> MemberState:
        """What it holds, as the others are told when a generation forms."""
        if self.lineage is None:
            return MemberState(None, None, None, frozenset())
        return MemberState(
            applied_step=self.step,
            record=self.record,
            reduced_step=self.step + 1 if self.reduced_in else None,
            sections=self.sections,
            reduced_by=(self.reduced_in, 0) if self.reduced_in else None,
            branch=self.branch,
            agreed_in=self.agreed_in,
        )

    def report(self) -> WorkerReport:
        return WorkerReport.model_construct(
            worker=self.worker,
            incarnation=self.incarnation,
            phase=self.phase,
            generation=self.generation,
            prepared=self.prepared,
            endpoint=f"{self.worker}:{self.prepared}" if self.prepared else None,
            graph_hash=self.graph_hash,
            step=self.step,
            formed=self.formed,
            lost=list(self.lost),
            published=self.published,
            failure=self.failure,
            profile=self.profile,
            forward_s=self.vm.pace * len(self.sections),
            backward_s=2 * self.vm.pace * len(self.sections),
            profiling=self.profiling,
        )


@dataclass(eq=False)
class SimVm:
    """A machine with its agent and its trainers."""

    name: str
    pace: float = 1.0  # how many times longer than calibrated its workers take
    alive: bool = True
    connected: bool = True
    stopped: bool = False
    down: bool = False  # it reboots
    starts: int = 0  # reboots so far
    at_risk: bool = False
    sequence: int = 0
    orders: Orders | None = None
    deadline: float | None = None
    heard_at: float = 0.0  # when the manager last took in a report
    trainers: list[Trainer] = field(default_factory=list)
    told: list[WorkerReport] = field(default_factory=list)  # as last reported
    deaths: list[WorkerReport] = field(default_factory=list)  # that the manager has not heard of

    def report(self, now: float, *, changed: bool) -> Report:
        self.sequence += 1
        if changed or not self.told:
            self.told = [trainer.report() for trainer in self.trainers]
        return Report.model_construct(
            vm=self.name,
            sequence=self.sequence,
            orders_version=self.orders.version if self.orders else 0,
            address="127.0.0.1",
            devices=DEVICES * len(self.trainers),
            workers=self.told,
            deaths=list(self.deaths),
            metrics=[],
            notice_deadline_s=None if self.deadline is None else self.deadline - now,
            notices_known=True,
            at_risk=self.at_risk,
            leaving=None,
        )


@dataclass(eq=False)
class ProfileGroup:
    """The members of a generation of kind `profile`, as they meet."""

    order: GenerationOrder
    arrived: dict[str, Trainer] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """The process groups of one generation, as its members share them."""

    order: GenerationOrder
    arrived: dict[str, Trainer] = field(default_factory=dict)
    running: bool = False
    broken: bool = False
    publishing: bool = False

    @property
    def num_workers(self) -> int:
        return len(self.order.plan["ranges"])

    @property
    def holds(self) -> bool:
        """Whether it holds after the next checkpoint."""
        workers = [self.arrived[name] for name in self.names[: self.num_workers]]
        return self.order.saves_only or all(trainer.hold for trainer in workers)

    @property
    def names(self) -> list[str]:
        return [member.worker for member in self.order.members]
