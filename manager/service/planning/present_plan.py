"""The plan that ran, rerouted, or the one that runs, beside the best new one: which is worth more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ....morphing import Before, Choice, Infeasible, Request, copies_in, copies_of
from ....pipeline import Plan
from ....simulator import simulate
from ...core.alternatives import Alternative
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import Generation, JobState
from ..planner.answer_table import Search
from .requests import request_of
from .weighing import Offer, weighed

_SEARCH = Search()


def or_present(
    state: JobState, command: ComputePlan, answer: PlanComputed, search: Search = _SEARCH
) -> PlanComputed:
    """The answer, or the plan that is there if that is worth as much; with what both are worth."""
    if command.reconsider:
        return _or_running(state, command, answer)
    return or_rerouted(state, command, answer, search)


def or_rerouted(
    state: JobState, command: ComputePlan, answer: PlanComputed, search: Search = _SEARCH
) -> PlanComputed:
    """The answer, or the plan that ran, rerouted around workers that are gone."""
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
    offers = [Offer("rerouted", request, found.plan, found.workers, found.predicted_s)]
    answer = _beside(answer, weighed([*offers, *_best(request, answer)], ends_s))
    if answer.alternatives[0].name != "rerouted":
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


def _or_running(state: JobState, command: ComputePlan, answer: PlanComputed) -> PlanComputed:
    """The answer, or that the plan that runs stays, and until when that pays."""
    current = state.current
    if current is None or state.calibration is None or _is_same(current, answer):
        return answer
    workers = [worker for worker, _ in current.incarnations]
    if not command.asked.issuperset(workers):
        return answer
    request = request_of(state, command.workers, command.generation, command.risk)
    plan = Plan.from_json(current.plan)
    now_s = _predicted_s(request, plan, workers)
    running = Offer("running", request, plan, workers, now_s, runs=True)
    offers = [running, *_best(request, answer, command.change_s)]
    ends_s, least_gain = _ends_s(command), command.least_gain
    answer = _beside(answer, weighed(offers, ends_s, least_gain)).model_copy(update={"current_s": now_s})
    if answer.alternatives[0].name != "running":
        return answer
    for_good = weighed(offers, math.inf, least_gain)[0].name == "running"
    until = answer.now + ends_s if not for_good and 0 < ends_s < math.inf else None
    return answer.model_copy(update={"stays": True, "best_until": until})


def _best(request: Request, answer: PlanComputed, change_s: float = 0.0) -> list[Offer]:
    if answer.plan is None or answer.predicted_s is None:
        return []
    plan = Plan.from_json(answer.plan)
    return [Offer("best", request, plan, answer.workers, answer.predicted_s, change_s=change_s)]


def _beside(answer: PlanComputed, alternatives: tuple[Alternative, ...]) -> PlanComputed:
    """The answer with these in place of what the best plan was said to be worth by itself."""
    others = tuple(one for one in answer.alternatives if one.name != "best")
    return answer.model_copy(update={"alternatives": (*alternatives, *others)})


def _is_same(current: Generation, answer: PlanComputed) -> bool:
    """Whether the answer is what runs."""
    if answer.plan is None or {*answer.workers} != {worker for worker, _ in current.incarnations}:
        return False
    return {**answer.plan, "generation": 0} == {**current.plan, "generation": 0}


def _predicted_s(request: Request, plan: Plan, workers: Sequence[str]) -> float:
    """Seconds of a step of the plan with the paces of now."""
    slots = {slot.worker: slot for slot in request.workers}
    calibration = request.calibration
    return simulate(
        plan,
        calibration.with_optimizer_on_host() if plan.optimizer_on_host else calibration,
        vm_of=[slots[worker].vm for worker in workers],
        slowdown=[slots[worker].slowdown for worker in workers],
        timeline=False,
    ).time_s


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
