"""What VMs and trainers of a seeded history are; what they do is in `world_protocol.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from calibrations import measured, uniform
from makara.manager.world import Trainer, Vm
from makara.protocol.messages import (
    DeviceInfo,
    Failure,
    GenerationOrder,
    Orders,
    Profile,
    Profiling,
    Recipe,
    Report,
    WorkerReport,
)
from makara.protocol.survey import Layout, SectionRow, Survey, Timed
from makara.simulator import MeasuredWire
from makara.simulator.calibration.assembly import measurements_of
from makara.simulator.calibration.microbatch_size import profile_of
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


WIRE = MeasuredWire(
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
    wires = [MeasuredWire.from_json(WIRE)] if links else []
    rows = [row(m, section) for m in (1, 2) for section in range(3)]
    found = measurements_of(SURVEY, rows, wires, [])
    return profile_of(found, RECIPE, wanted=None, memory_bytes=1 << 30, most_workers=2)


@dataclass(eq=False, kw_only=True)
class SimTrainer(Trainer):
    """A trainer that faults may befall. Its weights are stood for by their *lineage*: the generation that
    committed each step."""

    vm: SimVm
    profiling: Profiling = field(default_factory=Profiling)
    lineage: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    failure: Failure | None = None
    go: GenerationOrder | None = None
    hold: bool = False
    stopped: bool = False
    alive: bool = True

    def commit(self, generation: int) -> None:
        super().commit(generation)
        self.lineage = (*self.lineage, generation)

    def told(self) -> dict[str, Any]:
        num_sections = len(self.span.sections) if self.span is not None else 0
        return super().told() | {
            "lost": list(self.lost),
            "failure": self.failure,
            "forward_s": self.vm.pace * num_sections,
            "backward_s": 2 * self.vm.pace * num_sections,
        }


@dataclass(eq=False)
class SimVm(Vm[SimTrainer]):
    """A VM that faults may befall."""

    pace: float = 1.0  # how many times longer than calibrated its workers take
    connected: bool = True
    stopped: bool = False
    down: bool = False  # it reboots
    starts: int = 0  # reboots so far
    at_risk: bool = False
    orders: Orders | None = None
    heard_at: float = 0.0  # when the manager last took in a report
    reported: list[WorkerReport] = field(default_factory=list)  # its trainers, as last reported
    deaths: list[WorkerReport] = field(default_factory=list)  # that the manager has not heard of

    def newest_report(self, now_ns: int, *, changed: bool) -> Report:
        if changed or not self.reported:
            self.reported = [trainer.report() for trainer in self.trainers]
        return self.report(now_ns, DEVICES * len(self.trainers), self.orders.version if self.orders else 0)

    def told(self) -> dict[str, Any]:
        deaths = list(self.deaths)
        return {"workers": self.reported, "deaths": deaths, "notices_known": True, "at_risk": self.at_risk}


@dataclass(eq=False)
class Meeting:
    """The members of a generation as they meet: rank 0 knows who they are."""

    order: GenerationOrder
    arrived: dict[str, SimTrainer] = field(default_factory=dict)

    def arrive(self, trainer: SimTrainer, order: GenerationOrder) -> None:
        self.arrived[trainer.worker] = trainer
        if order.members:
            self.order = order

    @property
    def names(self) -> list[str]:
        """By rank; rank 0 alone, as long as it has not come."""
        return [member.worker for member in self.order.members] or [self.order.first]

    @property
    def has_all(self) -> bool:
        return all(name in self.arrived for name in self.names)


@dataclass(eq=False)
class Group(Meeting):
    """The process groups of one generation, as its members share them."""

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
