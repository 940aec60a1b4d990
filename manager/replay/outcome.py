"""What came of a replay: throughput, goodput, morphs, losses, and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..core.state import Generation, JobState
from .scenario import EPOCH_S, ReplayError
from .training import FormCost, Sample

PHASES = ("decide", "prepare", "open", "form")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What an hour of a VM costs, in any one currency. None: nobody said."""

    spot: float | None = None
    on_demand: float | None = None

    def __post_init__(self) -> None:
        for name in ("spot", "on_demand"):
            value: float | None = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ReplayError(f"{name} price: {value:g} is not an amount >= 0 for a VM and hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Morph:
    """A generation that was planned. Seconds; `at_s` counts from the start of the trace to the decision."""

    generation: int
    at_s: float
    cause: str
    kind: str
    """start, death, notice, growth, return (after none could run), or other."""
    before: str | None
    after: str
    rung: str | None
    """Where its state came from; None: it never formed, and `ended` says why."""
    lost_steps: int
    idle_s: float | None
    """Without steps, from the last one before it to its first."""
    phases_s: Mapping[str, float]
    ended: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The same job on VMs that never leave."""

    num_vms: int
    shape: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy's replay. The `seconds` of all items together are `wall_s`."""

    policy: str
    about: str
    wall_s: float
    finished: bool
    steps: int
    samples: int
    goodput: float
    """Useful steps over wall time: 1 if nothing but steps that count had been done all the time."""
    samples_per_s: float
    seconds: Mapping[str, float]
    morphs: Sequence[Morph]
    lost_steps: int
    cut_off_steps: int
    checkpoints: int
    vm_hours: float
    most_vms: int
    steady: Steady | None
    prices: Prices
    series: Sequence[Sample]
    num_decisions: int

    @property
    def spot_cost(self) -> float | None:
        return None if self.prices.spot is None else self.prices.spot * self.vm_hours

    @property
    def on_demand_cost(self) -> float | None:
        """The same steps on the steady cluster."""
        if self.steady is None or self.prices.on_demand is None:
            return None
        hours = self.steps * self.steady.step_s / 3600
        return self.prices.on_demand * hours * self.steady.num_vms

    def per_million(self, cost: float | None) -> float | None:
        """What a million samples cost."""
        return None if cost is None or not self.samples else 1e6 * cost / self.samples

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["series"] = [asdict(sample) for sample in self.series]
        costs = {"spot": self.spot_cost, "on_demand": self.on_demand_cost}
        value["cost"] = costs | {f"{name}_per_million": self.per_million(c) for name, c in costs.items()}
        return value


def morphs(state: JobState, begun: Mapping[int, FormCost]) -> list[Morph]:
    """Every generation that the core planned, oldest first."""
    present = [generation for generation in (state.current, state.planned) if generation is not None]
    found: list[Morph] = []
    before: str | None = None
    for generation in (*state.history, *present):
        found.append(_morph(generation, before, begun.get(generation.number)))
        if generation.formed is not None:
            before = generation.shape
    return found


def _morph(generation: Generation, before: str | None, begun: FormCost | None) -> Morph:
    marks = (generation.planned_at, generation.prepared_at, generation.opened_at, generation.formed_at)
    phases: dict[str, float] = {}
    reached = generation.detected_at
    for name, at in zip(PHASES, marks, strict=True):
        if at is not None:
            phases[name] = at - reached
            reached = at
    return Morph(
        generation=generation.number,
        at_s=generation.planned_at - EPOCH_S,
        cause=generation.cause,
        kind=kind_of(generation.cause),
        before=before,
        after=generation.shape,
        rung=generation.formed.rung if generation.formed is not None else None,
        lost_steps=begun.lost_steps if begun is not None else 0,
        idle_s=begun.idle_ns / 1e9 if begun is not None else None,
        phases_s=phases,
        ended=generation.end_reason or None,
    )


def kind_of(cause: str) -> str:
    """The kind of a morph, by the words with which the core gives its cause."""
    words = {"start": "start", "lost ": "death", "notice for ": "notice", "workers are back": "return"}
    if cause.endswith(" joined"):
        return "growth"
    return next((kind for beginning, kind in words.items() if cause.startswith(beginning)), "other")
