"""Plans that keep what is there beside the best new one: which is worth most.

They are the plan that ran, rerouted, or the one that runs, and those around the pipelines that are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....morphing import Before, Choice, Infeasible, Request, copies_in, reformed, rerouted
from ....pipeline import Plan
from ....simulator import simulate
from ...core.alternatives import Alternative
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import Generation, JobState
from .requests import request_of
from .weighing import Offer, num_copies, weighed

_FEWER_COPIES = "some section would live on fewer VMs than the job asks for"


def or_present(state: JobState, command: ComputePlan, answer: PlanComputed) -> PlanComputed:
    """The answer, or a plan that keeps what is there if that is worth as much; with what each is worth."""
    if command.reconsider:
        return _or_running(state, command, answer)
    return or_keeping(state, command, answer)


def or_keeping(state: JobState, command: ComputePlan, answer: PlanComputed) -> PlanComputed:
    """The answer, or the plan that ran, rerouted around workers that are gone, or one around the pipelines
    that are whole."""
    if command.lasts_s is None or not state.hosts_plan or state.calibration is None:
        return answer
    request = request_of(state, command.workers, command.generation, command.risk)
    ran = _ran(state)
    found, shape = rerouted(request, ran), ran.plan.shape
    ends_s, most_s = _ends_s(command), math.inf
    if isinstance(found, Choice) and _has_fewer_copies(request, found, answer):
        most_s = command.fewer_copies_s
        if min(command.lasts_s, most_s) <= 0:
            found, shape = Infeasible(_FEWER_COPIES), found.plan.shape
    if isinstance(found, Infeasible):
        refused = Alternative(name="rerouted", shape=shape, rejected=found.reason)
        answer = answer.model_copy(update={"alternatives": (*answer.alternatives, refused)})
    new = list(_new(request, ran, answer, ends_s))
    if isinstance(found, Choice):
        kept = Offer("rerouted", request, found.plan, found.workers, found.predicted_s)
        by_worth = weighed([kept, *new], min(ends_s, most_s))
        if by_worth[0][0] is kept:
            until = answer.now + min(command.lasts_s, most_s)
            return _taking(kept, _beside(answer, by_worth)).model_copy(update={"best_until": until})
        if most_s < ends_s:  # the others do not end when the reroute, for want of copies, would have to
            by_worth = [*weighed(new, ends_s), *(one for one in by_worth if one[0] is kept)]
    elif new:
        by_worth = weighed(new, ends_s)
    else:
        return answer
    taken = by_worth[0][0]
    until = None if taken.name == "best" else answer.now + command.lasts_s
    return _taking(taken, _beside(answer, by_worth)).model_copy(update={"best_until": until})


def _or_running(state: JobState, command: ComputePlan, answer: PlanComputed) -> PlanComputed:
    """The answer, a plan around the pipelines that are whole, or that the plan that runs stays, and until
    when that pays."""
    current = state.current
    if current is None or state.calibration is None or _is_same(current, answer):
        return answer
    workers = [worker for worker, _ in current.incarnations]
    if not command.asked.issuperset(workers):
        return answer
    request = request_of(state, command.workers, command.generation, command.risk)
    plan = Plan.from_json(current.plan)
    now_s = _predicted_s(request, plan, workers)
    ends_s, least_gain = _ends_s(command), command.least_gain
    running = Offer("running", request, plan, workers, now_s, runs=True)
    new = _new(request, _ran(state), answer, ends_s, command.change_s)
    offers = [running, *(one for one in new if not _is_no_better(one, running))]
    by_worth = weighed(offers, ends_s, least_gain)
    taken, others = by_worth[0][0], [offer for offer, _ in by_worth if not offer.runs]
    if others:
        answer = _taking(others[0], answer)
    in_the_end = weighed(offers, math.inf, least_gain)[0][0]
    for_good = in_the_end is taken or taken.name == "best"
    until = answer.now + ends_s if not for_good and 0 < ends_s < math.inf else None
    return _beside(answer, by_worth).model_copy(
        update={"current_s": now_s, "stays": taken.runs, "best_until": until}
    )


def _ran(state: JobState) -> Before:
    return Before(Plan.from_json(state.hosts_plan), [worker for worker, _ in state.hosts])


def _new(
    request: Request, ran: Before, answer: PlanComputed, ends_s: float, change_s: float = 0.0
) -> Iterator[Offer]:
    """Plans around the pipelines that are whole, with as many copies of each section as the best plan has, or
    as the job asks for; then the best plan."""
    if answer.plan is None or answer.predicted_s is None:
        return
    best, step_s = Plan.from_json(answer.plan), answer.predicted_s
    copies = min(request.tolerated_failures + 1, num_copies(request, best, answer.workers))
    asked = replace(request, tolerated_failures=copies - 1)
    for one in reformed(asked, ran, best, step_s, ends_s, change_s):
        yield Offer("reformed", request, one.plan, one.workers, one.predicted_s, change_s=change_s)
    yield Offer("best", request, best, answer.workers, step_s, change_s=change_s)


def _taking(offer: Offer, answer: PlanComputed) -> PlanComputed:
    return answer.model_copy(
        update={
            "plan": offer.plan.to_json(),
            "workers": tuple(offer.workers),
            "predicted_s": offer.step_s,
            "reason": None,
        }
    )


def _beside(answer: PlanComputed, by_worth: Sequence[tuple[Offer, Alternative]]) -> PlanComputed:
    """The answer with these in place of what the best plan was said to be worth by itself."""
    others = tuple(one for one in answer.alternatives if one.name != "best")
    return answer.model_copy(update={"alternatives": (*(one for _, one in by_worth), *others)})


def _is_same(current: Generation, answer: PlanComputed) -> bool:
    """Whether the answer is what runs."""
    if answer.plan is None or {*answer.workers} != {worker for worker, _ in current.incarnations}:
        return False
    return {**answer.plan, "generation": 0} == {**current.plan, "generation": 0}


def _is_no_better(one: Offer, running: Offer) -> bool:
    """Whether each worker would hold what it holds, and steps would take as long."""
    held, holds = (dict(zip(each.workers, each.plan.ranges, strict=True)) for each in (running, one))
    return held == holds and one.step_s >= running.step_s


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


def _has_fewer_copies(request: Request, found: Choice, answer: PlanComputed) -> bool:
    """Whether the rerouted plan leaves a section on fewer of the VMs that the job asks for than the other."""
    if not request.tolerated_failures or answer.plan is None:
        return False
    could_have = num_copies(request, Plan.from_json(answer.plan), answer.workers)
    return copies_in(found, request.workers) < min(could_have, request.tolerated_failures + 1)


def _ends_s(command: ComputePlan) -> float:
    return math.inf if command.ends_s is None else command.ends_s
