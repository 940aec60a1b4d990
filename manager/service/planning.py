"""Answers `ComputePlan` and `ComputeGrowth`: turns a job's state into requests to `makara.morphing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ...morphing import (
    Before,
    Choice,
    Infeasible,
    Request,
    Risk,
    Slot,
    choose,
    copies_in,
    copies_of,
)
from ...pipeline import Plan, Range
from ...simulator import Calibration, InvalidCalibration, simulate
from ..core.alternatives import Alternative
from ..core.commands import ComputeGrowth, ComputePlan, DeathRisk, WorkerSlot
from ..core.events import GrowthComputed, PlanComputed
from ..core.state import JobState
from ..spec.job_spec import JobSpec
from .planner.answer_table import Search
from .weighing import Offer, passed_over, weighed

_SEARCH = Search()

Choose: TypeAlias = Callable[[JobState, ComputePlan, Callable[[], float]], PlanComputed]
"""From a job's state, the core's question and a clock to the plan that its workers are to follow."""


def compute_plan(
    state: JobState,
    command: ComputePlan,
    clock: Callable[[], float],
    search: Search = _SEARCH,
) -> PlanComputed:
    """The best plan for the command's workers, or why there is none. Blocks; pure but for `clock`.

    The plan that ran, rerouted around workers that are gone, is taken where it is worth more.
    """
    return or_rerouted(state, command, _chosen(state, command, clock, search), search)


def or_rerouted(
    state: JobState, command: ComputePlan, answer: PlanComputed, search: Search = _SEARCH
) -> PlanComputed:
    """The answer, or the rerouted plan if that is worth as much; with what both are worth."""
    if command.lasts_s is None or not state.hosts_plan or state.calibration is None:
        return answer
    request = request_of(state, command.workers, command.generation, command.risk)
    ran = Before(Plan.from_json(state.hosts_plan), [worker for worker, _ in state.hosts])
    found = search.rerouted(request, ran)
    if found is None:
        return answer
    if isinstance(found, Infeasible):
        return _refused(answer, ran.plan, found.reason)
    lasts_s, ends_s = command.lasts_s, _ends_s(command)
    if answer.plan is not None and _has_fewer_copies(request, found, answer.plan, answer.workers):
        lasts_s, ends_s = min(lasts_s, command.fewer_copies_s), min(ends_s, command.fewer_copies_s)
        if lasts_s <= 0:
            return _refused(answer, found.plan, "some section would live on fewer VMs than the job asks for")
    offers = [Offer("rerouted", found.plan, found.workers, found.predicted_s)]
    if answer.plan is not None and answer.predicted_s is not None:
        best = Plan.from_json(answer.plan)
        offers.append(Offer("best", best, answer.workers, answer.predicted_s))
    alternatives = weighed(request, offers, ends_s)
    others = tuple(one for one in answer.alternatives if one.name != "best")
    answer = answer.model_copy(update={"alternatives": (*alternatives, *others)})
    if alternatives[0].name != "rerouted":
        return answer
    return answer.model_copy(
        update={
            "plan": found.plan.to_json(),
            "workers": found.workers,
            "predicted_s": found.predicted_s,
            "best_until": answer.now + lasts_s,
            "reason": None,
        }
    )


def _has_fewer_copies(
    request: Request, found: Choice, plan: Mapping[str, Any], workers: Sequence[str]
) -> bool:
    """Whether the rerouted plan leaves a section on fewer of the VMs that the job asks for than the other."""
    if not request.tolerated_failures:
        return False
    vm_of = {slot.worker: slot.vm for slot in request.workers}
    could_have = copies_of(Plan.from_json(plan), [vm_of[worker] for worker in workers])
    return copies_in(found, request.workers) < min(could_have, request.tolerated_failures + 1)


def _refused(answer: PlanComputed, plan: Plan, reason: str) -> PlanComputed:
    refused = Alternative(name="rerouted", shape=plan.shape, rejected=reason)
    return answer.model_copy(update={"alternatives": (*answer.alternatives, refused)})


def _ends_s(command: ComputePlan) -> float:
    return math.inf if command.ends_s is None else command.ends_s


def _chosen(
    state: JobState, command: ComputePlan, clock: Callable[[], float], search: Search
) -> PlanComputed:
    try:
        request = request_of(state, command.workers, command.generation, command.risk)
        answer = search.choose(request)
    except InvalidCalibration as error:
        return _none(command, clock, f"the calibration cannot be used: {error}")
    if isinstance(answer, Infeasible):
        return _none(command, clock, answer.reason)
    best = Offer("best", answer.plan, answer.workers, answer.predicted_s)
    return PlanComputed(
        now=clock(),
        generation=command.generation,
        asked=command.asked,
        plan=answer.plan.to_json(),
        workers=answer.workers,
        predicted_s=answer.predicted_s,
        current_s=_predicted_now(state, command) if command.reconsider else None,
        alternatives=(*weighed(request, [best], _ends_s(command)), *passed_over(answer)),
    )


def _none(command: ComputePlan, clock: Callable[[], float], reason: str) -> PlanComputed:
    return PlanComputed(
        now=clock(), generation=command.generation, asked=command.asked, plan=None, reason=reason
    )


def compute_growth(state: JobState, command: ComputeGrowth, clock: Callable[[], float]) -> GrowthComputed:
    """The fewest additional VMs that save enough of a step. Blocks. Raises `InvalidCalibration`.

    More workers never make the best plan slower, because a plan may leave some out. So the number is found by
    bisection, in as many sweeps as it has binary digits, plus two.
    """
    now = request_of(state, command.workers, generation=0)

    def step_s(num_more: int) -> float | None:
        """None: there is no plan, or none with as many copies of each section as the job asks for."""
        copies = [
            slot.model_copy(update={"worker": f"{n}/{slot.worker}", "vm": f"{n}/{slot.vm}"})
            for n in range(num_more)
            for slot in command.more
        ]
        workers = [*now.workers, *_slots(copies)]
        found = choose(replace(now, workers=workers, holding={}))
        if isinstance(found, Infeasible):
            return None
        few = now.tolerated_failures > 0 and copies_in(found, workers) <= now.tolerated_failures
        return None if few else found.predicted_s

    def grown(num_more: int) -> GrowthComputed:
        return GrowthComputed(
            now=clock(), key=command.key, num_more=num_more, step_s=before_s, grown_s=step_s(num_more)
        )

    before_s, too_few = step_s(0), 0
    best = grown(command.most)
    while best.gain >= command.least_gain and best.num_more - too_few > 1:
        found = grown((too_few + best.num_more) // 2)
        if found.gain >= command.least_gain:
            best = found
        else:
            too_few = found.num_more
    return best


def _predicted_now(state: JobState, command: ComputePlan) -> float | None:
    """Predicted seconds of a step of the running plan with the current paces; None if it does not run on the
    command's workers."""
    if state.current is None or state.calibration is None:
        return None
    slots = {slot.worker: slot for slot in command.workers}
    hosts = [worker for worker, _ in state.current.incarnations]
    if not slots.keys() >= set(hosts):
        return None
    return simulate(
        Plan.from_json(state.current.plan),
        Calibration.from_json(state.calibration),
        vm_of=[slots[worker].vm for worker in hosts],
        slowdown=[slots[worker].slowdown for worker in hosts],
        timeline=False,
    ).time_s


def request_of(
    state: JobState, workers: Iterable[WorkerSlot], generation: int, risk: DeathRisk | None = None
) -> Request:
    """The planner's request: the job's settings and these workers."""
    assert state.spec is not None, "only a submitted job is planned"
    assert state.recipe is not None, "a plan needs the recipe"
    assert state.calibration is not None, "a recipe comes with its calibration"
    return replace(
        request_for(state.spec, Calibration.from_json(state.calibration), _slots(workers), generation),
        num_sections=state.recipe.num_sections,
        num_micro_batches=state.recipe.num_micro_batches,
        memory_limit_bytes=state.spec.resources.device_memory,
        holding=holding(state),
        risk=Risk(**risk.model_dump()) if risk is not None else None,
    )


def request_for(
    spec: JobSpec, calibration: Calibration, workers: Sequence[Slot], generation: int = 1
) -> Request:
    """The planner's request by a job file, for workers that hold nothing."""
    parallelism = spec.parallelism
    return Request(
        calibration=calibration,
        num_sections=calibration.num_sections,
        num_micro_batches=spec.training.global_batch_size // calibration.microbatch_size,
        workers=workers,
        generation=generation,
        pipeline_parallel_degree=parallelism.pipeline_parallel_degree,
        data_parallel_degree=parallelism.data_parallel_degree,
        recompute=parallelism.recompute,
        halves=parallelism.halves,
        unequal_pipelines=parallelism.unequal_pipelines,
        tolerated_failures=spec.resilience.tolerated_failures,
        optimizer_offload=spec.offload,
    )


def _slots(workers: Iterable[WorkerSlot]) -> list[Slot]:
    return [Slot(w.worker, w.vm, w.memory_bytes, w.slowdown) for w in workers]


def holding(state: JobState) -> dict[str, Range]:
    """{worker: the sections that it hosted when a generation last formed}. Workers still hold them after a
    death closed that generation; a trainer that has failed since holds nothing."""
    return {
        incarnation.worker: Range(start, stop)
        for incarnation, (start, stop) in state.hosts.items()
        if not state.has_failed(incarnation)
    }
