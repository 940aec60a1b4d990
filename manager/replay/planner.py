"""The manager's planner, asked once for each distinct cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ...morphing import Choice, Infeasible, Roster, Slot, place_in
from ...pipeline import Plan, Range
from ...simulator import Calibration
from ..core.commands import ComputePlan
from ..core.events import PlanComputed
from ..core.state import JobState
from ..service.planning.answers import best_plan
from ..service.planning.present_plan import or_keeping, or_present
from ..service.planning.requests import holding


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer, what placed its ranks, and which of them shared a VM."""

    answer: PlanComputed
    ranges: tuple[Range, ...]
    saved_bytes: Sequence[int]
    together: tuple[int, ...]


class CachedPlanner:
    """Answers `ComputePlan` as `compute_plan` does. The time a plan takes depends on the number of workers,
    on their memory and on which of them share a VM, not on their names; so a question is put to the planner
    only where one of these differs, and otherwise the workers of now take the places of the known plan, by
    `morphing.place`, as the planner would have it.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self.num_asked = 0
        self.num_answered = 0
        self.asked_s = 0.0
        """Real seconds spent in the planner itself."""

    def answer(self, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
        self.num_answered += 1
        return or_present(state, command, self._chosen(state, command, now))

    def _chosen(self, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
        return self.recalled(
            key_of(state, command),
            state,
            command,
            now,
            lambda: best_plan(state, command, lambda: now),
        )

    def rerouted(self, state: JobState, command: ComputePlan, now: float) -> PlanComputed | None:
        """The plan of before, rerouted around the workers that are gone; None where that is not possible."""
        nothing = PlanComputed(now=now, generation=command.generation, asked=command.asked, plan=None)
        self.num_answered += 1
        found = or_keeping(state, command.model_copy(update={"lasts_s": math.inf}), nothing)
        return None if found.plan is None else found.model_copy(update={"best_until": None})

    def recalled(
        self,
        key: Hashable,
        state: JobState,
        command: ComputePlan,
        now: float,
        compute: Callable[[], PlanComputed],
    ) -> PlanComputed:
        """The answer known by `key` for the workers of now, else what `compute` says."""
        known = self._known.get(key)
        if known is not None:
            again = _again(known, state, command, now)
            if again is not None:
                return again
        began = time.perf_counter()
        answer = compute()
        self.asked_s += time.perf_counter() - began
        self.num_asked += 1
        self._known[key] = _remembered(answer, state, command)
        return answer


def key_of(state: JobState, command: ComputePlan) -> Hashable:
    """What the time of a plan for these workers depends on, within one job."""
    workers = command.workers
    assert state.spec is not None, "only a submitted job is planned"
    memory = tuple(slot.memory_bytes for slot in workers)
    alike = memory[0] if len(set(memory)) == 1 else memory
    sizes: dict[str, int] = {}
    for slot in workers:
        sizes[slot.vm] = sizes.get(slot.vm, 0) + 1
    return state.spec.parallelism, command.risk, len(workers), alike, tuple(sorted(sizes.values()))


def _remembered(answer: PlanComputed, state: JobState, command: ComputePlan) -> _Known:
    if answer.plan is None:
        return _Known(answer, (), (), ())
    plan = Plan.from_json(answer.plan)
    vm_of = {slot.worker: slot.vm for slot in command.workers}
    assert state.calibration is not None, "a plan needs the calibration"
    saved_bytes = Calibration.from_json(state.calibration).saved_bytes
    return _Known(answer, plan.ranges, saved_bytes, _together([vm_of[worker] for worker in answer.workers]))


def _again(known: _Known, state: JobState, command: ComputePlan, now: float) -> PlanComputed | None:
    """The known answer for the workers of now; None if other ranks would share a VM than did then."""
    told = {"now": now, "generation": command.generation, "asked": command.asked}
    if known.answer.plan is None:
        return known.answer.model_copy(update=told)
    slots = [Slot(slot.worker, slot.vm, slot.memory_bytes) for slot in command.workers]
    held = holding(state)
    used = Roster(slots, held).used(len(known.answer.workers))
    placed = place_in(known.ranges, used, held, known.saved_bytes)
    if _together([slot.vm for slot in placed]) != known.together:
        return None
    plan = {**known.answer.plan, "generation": command.generation}
    return known.answer.model_copy(
        update={**told, "plan": plan, "workers": tuple(slot.worker for slot in placed)}
    )


def _together(vms: Sequence[str]) -> tuple[int, ...]:
    """For each rank the first rank on the same VM."""
    first: dict[str, int] = {}
    return tuple(first.setdefault(vm, rank) for rank, vm in enumerate(vms))


def answer_of(command: ComputePlan, found: Choice | Infeasible, now: float) -> PlanComputed:
    """The answer that takes what was found."""
    answer = PlanComputed(now=now, generation=command.generation, asked=command.asked, plan=None)
    if isinstance(found, Infeasible):
        return answer.model_copy(update={"reason": found.reason})
    taken = {"plan": found.plan.to_json(), "workers": found.workers, "predicted_s": found.predicted_s}
    return answer.model_copy(update=taken)
