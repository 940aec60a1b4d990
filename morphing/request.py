"""Input and output of `choose`: the request, the candidates, and the choice or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..pipeline import Plan, Range, Schedule
from ..simulator import Calibration, MiniBatch, simulate
from .placement import Slot
from .risk import Risk


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `choose` chooses from. Raises `ValueError` naming the invalid field."""

    calibration: Calibration
    num_sections: int
    num_micro_batches: int
    workers: Sequence[Slot]
    generation: int
    schedule: Schedule = Schedule.VARUNA
    pipeline_parallel_degree: int | None = None
    """P, and below D (`data_parallel_degree`); None leaves it to the sweep."""
    data_parallel_degree: int | None = None
    memory_limit_bytes: int | None = None
    """A cap on what a plan may use of any worker, below what the worker has."""
    recompute: Literal["auto", "on", "off"] = "auto"
    halves: Literal["auto", "on", "off"] = "auto"
    """Whether backwards are an I and a W; `auto`: where that saves time. Never if they were not measured."""
    unequal_pipelines: Literal["auto", "off"] = "off"
    """Whether pipelines may be of different depth; `auto`: where that saves time."""
    optimizer_offload: Literal["auto", "on", "off"] = "auto"
    """Whether optimizer state lies in host memory; `auto`: only if there is no plan otherwise."""
    holding: Mapping[str, Range] = field(default_factory=dict[str, Range])
    """{worker: the sections that it hosts already}; placement keeps them where possible."""
    risk: Risk | None = None
    """What deaths cost; None: they cost nothing that depends on the plan."""
    tolerated_failures: int = 0
    """Of so many VMs every set may die, and each section has a host left, where there are VMs enough."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_sections != self.calibration.num_sections:
            known = self.calibration.num_sections
            raise ValueError(f"num_sections: {self.num_sections}, but the calibration is of {known} sections")
        for name in (
            "num_micro_batches",
            "pipeline_parallel_degree",
            "data_parallel_degree",
            "memory_limit_bytes",
        ):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is not a whole number >= 1")
        if self.tolerated_failures < 0:
            raise ValueError(f"tolerated_failures: {self.tolerated_failures} is not a whole number >= 0")
        if len({slot.worker for slot in self.workers}) < len(self.workers):
            raise ValueError("workers: a worker occurs twice")
        if any(not slot.slowdown > 0 for slot in self.workers):
            raise ValueError("workers: every slowdown must be > 0")

    def simulated(self, plan: Plan, calibration: Calibration, slots: Sequence[Slot] | None) -> MiniBatch:
        """A step of a plan on these workers, by rank; None: each on its own VM, and as fast as calibrated."""
        return simulate(
            plan,
            calibration,
            vm_of=None if slots is None else [slot.vm for slot in slots],
            slowdown=None if slots is None else [slot.slowdown for slot in slots],
            seed=self.seed,
            timeline=False,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the sweep.

    A shape may have several rows, with different windows or with slow workers in different places.
    `pipeline_parallel_degree` and `data_parallel_degree` of unequal pipelines: the depth of the deepest, and
    their number.
    """

    pipeline_parallel_degree: int
    data_parallel_degree: int
    recompute: bool
    optimizer_on_host: bool = False
    halves: bool = False
    """Whether backwards are an I and a W."""
    window: int | None = None
    predicted_s: float | None = None
    pipeline_s: float | None = None
    """The part of `predicted_s` until the last backward ends; all-reduces, commit and update follow."""
    busy_s: float | None = None
    """Compute time of the busiest worker."""
    peak_bytes: int | None = None
    """The largest peak memory of any worker."""
    rejected: str | None = None
    """Why this shape cannot be used; `predicted_s` may then be None."""
    slow_stage: int | None = None
    """The stage that the slow workers take, with fewer sections; None: they take any, or are left out."""
    lost: float = 0.0
    """Seconds lost to deaths after which no host of some section is left, for each second of steps."""
    copies: int | None = None
    """The number of VMs that host the section with the fewest; None: not looked at."""
    missing: int = 0
    """Workers of the grid that are gone, whose micro-batches their peers take (see `reroute`)."""
    pipelines: tuple[int, ...] = ()
    """The number of workers of each pipeline, if it is no grid."""

    def with_step(self, step: MiniBatch) -> Candidate:
        """The row with what a simulation of its plan predicts."""
        return replace(
            self,
            predicted_s=step.time_s,
            pipeline_s=step.pipeline_s,
            busy_s=max(step.busy_s),
            peak_bytes=max(step.peak_bytes),
        )

    @property
    def used(self) -> int:
        if self.pipelines:
            return sum(self.pipelines)
        return self.pipeline_parallel_degree * self.data_parallel_degree - self.missing

    @property
    def shape(self) -> str:
        """As `Plan.shape`."""
        if self.pipelines:
            return "+".join(map(str, self.pipelines))
        lacking = f"-{self.missing}" if self.missing else ""
        return f"{self.pipeline_parallel_degree}x{self.data_parallel_degree}{lacking}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The best plan. `workers` are ids in rank order; `candidates` are all rows tried, by P and D."""

    plan: Plan
    workers: tuple[str, ...]
    predicted_s: float
    candidate: Candidate
    """The plan's row."""
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan: `reason` is a sentence for the user."""

    reason: str
    candidates: tuple[Candidate, ...] = ()
