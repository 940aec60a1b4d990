"""The step in flight of a replay: what the trainers' sums hold of it, and how long the rest of it takes.

The members choose what counts by the trainers' own rule (`morphing.in_flight`), and deal what is missing as
they do. What was done when a step was cut off follows from its simulated timeline. Each section counts as a
bucket of its own; real trainers deal by the model's operations, a replay by measured forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ...morphing.in_flight import Parcel, StepInFlight, bringers, continue_step
from ...pipeline import Plan
from ...pipeline.contributions import Pairs, micro_batches_of
from ...pipeline.plan import RestOfStep
from ...pipeline.rest_of_step import rest_of_step
from ...simulator import Calibration, StepProgress, to_ns
from ..core.state import vm_of
from ..world import Beginning

_KEPT = 64  # simulated steps; each is as large as its plan has operations


@dataclass(frozen=True, slots=True)
class Held:
    """What one trainer has of the step that follows `step` and `branch` (see `Parcel`)."""

    step: int
    branch: int
    contributions: Mapping[int, int] = field(default_factory=dict[int, int])
    """{section: micro-batches, as bits}."""
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Continued:
    """A step that a generation goes on with."""

    step: StepInFlight
    rest: RestOfStep
    progress: StepProgress
    losses: Mapping[int, int]
    """{rank: the micro-batches whose piece of the loss it contributes, as bits}."""


class StepsInFlight:
    """What each trainer of a replay has of a step, over generations."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._work = [max(1, to_ns(forward_s)) for forward_s in calibration.forward_s]
        self.held: dict[str, Held] = {}
        """By worker."""
        self._simulated = lru_cache(maxsize=_KEPT)(self._simulate)

    def cut_off(
        self,
        plan: Plan,
        workers: Sequence[str],
        continued: Continued | None,
        under_way_s: float,
        *,
        step: int,
        branch: int,
    ) -> None:
        """The workers of `plan`, in rank order, came to a halt `under_way_s` into a step.

        `continued`: the rest that they were at, if it was one.
        """
        progress = self._whole(plan, workers) if continued is None else continued.progress
        for worker, done in zip(workers, progress.at(under_way_s), strict=True):
            before = Held(step, branch) if continued is None else self.held[worker]
            both = dict(before.contributions)
            for section, bits in done.contributions.items():
                both[section] = both.get(section, 0) | bits
            self.held[worker] = Held(step, branch, both, before.losses | done.losses)

    def stretched(self, plan: Plan, workers: Sequence[str], step_s: float) -> float:
        """How many times as long as simulated a step of the plan takes, if it takes `step_s`.

        A planner may know steps from elsewhere than this simulation, such as a table of measured throughputs.
        What is done of such a step, and its rest, are the simulated parts of it: else the time that a step
        takes longer would be won by whatever cuts it off.
        """
        return step_s / self._whole(plan, workers).time_s

    def go_on(self, plan: Plan, members: Sequence[str], beginning: Beginning) -> Continued | None:
        """What the members of a forming generation can go on with; None: they begin the step again.

        The workers of `plan` come first, in rank order.
        """
        if beginning.rung != "peers":
            return None
        nothing = Held(beginning.step, beginning.branch)
        shown = [self.held.get(member, nothing) for member in members]
        step = continue_step(
            [_parcels(held) for held in shown],
            step=beginning.step,
            branch=beginning.branch,
            hosts={(section,): plan.hosts(section) for section in range(plan.num_sections)},
            num_micro_batches=plan.num_micro_batches,
        )
        if not step.kept:
            return None
        current = [
            list(micro_batches_of(held.losses))
            if (held.step, held.branch) == (beginning.step, beginning.branch)
            else []
            for held in shown
        ]
        known = bringers(current, plan.num_workers)
        losses: dict[int, int] = {}
        for micro_batch, (_, rank) in known.items():
            losses[rank] = losses.get(rank, 0) | 1 << micro_batch
        unknown = set(range(plan.num_micro_batches)).difference(known)
        rest = rest_of_step(plan, step.missing, unknown, self._work)
        vms = [vm_of(worker) for worker in members[: plan.num_workers]]
        progress = StepProgress(rest, self._calibration, vm_of=vms)
        return Continued(step, rest, progress, losses)

    def begin(self, workers: Sequence[str], beginning: Beginning, continued: Continued | None) -> None:
        """The generation has formed: from now on its workers alone hold what counts."""
        self.held = {}
        if continued is None:
            return
        contributions: list[dict[int, int]] = [{} for _ in workers]
        for kept in continued.step.kept:
            own = contributions[kept.destination]
            for section, bits in zip(kept.pairs.sections, kept.pairs.micro_batches, strict=True):
                own[section] = own.get(section, 0) | bits
        for rank, worker in enumerate(workers):
            held = contributions[rank], continued.losses.get(rank, 0)
            self.held[worker] = Held(beginning.step, beginning.branch, *held)

    def committed(self) -> None:
        """The step that was under way is done, or given up."""
        self.held = {}

    def _whole(self, plan: Plan, workers: Sequence[str]) -> StepProgress:
        """The simulated step of a whole plan: the same for all generations of its form."""
        vms = [vm_of(worker) for worker in workers]
        together = tuple(vms.index(vm) for vm in vms)
        return self._simulated(replace(plan, generation=0), together)

    def _simulate(self, plan: Plan, together: Sequence[int]) -> StepProgress:
        """`together`: by rank, of the workers on its VM the first."""
        return StepProgress(plan, self._calibration, vm_of=list(map(str, together)))


def _parcels(held: Held) -> list[Parcel]:
    return [
        Parcel(held.step, held.branch, 0, "", Pairs((section,), (bits,)))
        for section, bits in held.contributions.items()
    ]
