"""Whether more VMs of a cloud pay for the change that takes them in: the planner is asked before the cloud.

The planner is asked for the fewest additional VMs that are worth more than what taking them in costs
(docs/choice.md), given the VMs that exist or were requested: 1 % more, since a cloud is paid for them. They
are requested together, and then the next question follows. An answer is kept until something that it depends
on changes; one question is asked at a time. If the planner fails, as many VMs are requested as the job may
have.

The planner is not asked before a job has run, nor for VMs up to `min_nodes`. A VM that replaces a lost one
counts as an additional VM.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...spec.placement import Placement
from .. import worth
from ..commands import ComputeGrowth, DeathRisk, WorkerSlot
from ..context import Context
from ..events import GrowthComputed, JobCommandFailed
from ..facts import GrowthWeighed
from ..observations import Growth
from ..slots import slot_of
from ..state import JobState, staying_vms, wanted_vms
from ..vms import Vm

_ASKED = "the planner is asked whether more of them would pay"
_KEPT = 8  # questions: VMs that come and go lead back to earlier ones
_REMEMBERED = 100  # VMs that ended last: what those of a type had

_Kind = tuple[str, str]
"""Provider and type of a VM."""
_Workers = tuple[tuple[int, float], ...]
"""Memory in bytes and slowdown of each worker of a VM: names do not matter to what the planner says."""


def take(context: Context) -> None:
    """The planner's answer."""
    event, growth = context.event, context.observations.growth
    if isinstance(event, GrowthComputed):
        answered = [replace(it, answer=event) if it.key == event.key else it for it in growth]
        if any(it.key == event.key and it.answer is None for it in growth) and event.alternatives:
            num_more = event.num_more if event.pays else 0
            context.fact(GrowthWeighed(at=context.now, num_more=num_more, alternatives=event.alternatives))
    elif isinstance(event, JobCommandFailed) and event.command == "compute_growth":
        answered = [replace(it, failed=True) if it.key == event.key else it for it in growth]
    else:
        return
    context.note(growth=tuple(answered))


def may_rent(context: Context, placement: Placement, most: int) -> tuple[int, str]:
    """How many VMs, of `most` that could be had there, are asked for now; if none, why."""
    state = context.state
    if state.calibration is None or worth.last_formed(state) is None:
        return most, ""
    num_lacking = context.spec.resources.min_nodes - len(staying_vms(state))
    if num_lacking > 0:
        return min(num_lacking, most), ""
    present, more = _workers(context, placement)
    costs = _costs(context)
    sizes = tuple(sorted(present))  # in whatever order
    about = (sizes, more, most, costs, state.recipe_version, state.recalibrated_at)
    known = next((it for it in context.observations.growth if it.about == about), None)
    if known is None:
        if not any(_is_awaited(context, it) for it in context.observations.growth):
            key = f"{state.job}/growth/{state.num_facts}/{round(context.now * 1000)}"
            context.command(
                ComputeGrowth(
                    key=key,
                    workers=tuple(slot for n, vm in enumerate(present) for slot in _slots(str(n), vm)),
                    more=_slots("more", more),
                    most=most,
                    least_gain=context.timing.grow_worth_it,
                    change_s=costs.change_s,
                    ends_s=costs.ends_s,
                    risk=costs.risk,
                )
            )
            asked = Growth(about, key, context.now)
            context.note(growth=(*context.observations.growth, asked)[-_KEPT:])
        return 0, _ASKED
    if known.answer is None:
        return (0, _ASKED) if _is_awaited(context, known) else (most, "")
    return _judged(context, known.answer, most)


def _judged(context: Context, answer: GrowthComputed, most: int) -> tuple[int, str]:
    state = context.state
    if answer.step_s is None and answer.grown_s is None:
        return _without_any_plan(context, most)
    if answer.step_s is None:
        return answer.num_more, ""
    if state.current is None and state.planned is None and state.impossible is not None:
        return most, ""  # no plan works with the present VMs, though the answer assumed that one does
    if answer.pays:
        return answer.num_more, ""
    if answer.gain < 0.0005:
        return 0, f"no plan is faster with {answer.num_more} more"
    gain = f"{100 * answer.gain:.1f} %"
    return 0, f"{answer.num_more} more would make a step {gain} shorter, which does not pay for the change"


def _without_any_plan(context: Context, most: int) -> tuple[int, str]:
    """Where the planner finds no plan with all that are to be had there: others may come from elsewhere."""
    total = len(staying_vms(context.state)) + most
    if total < wanted_vms(context.state):
        return most, ""
    return 0, f"there is no plan, not even with {most} more of them"


# ---- the question ------------------------------------------------------------------------------------------


class _Costs(NamedTuple):
    """What taking VMs in costs, and for how long they are good: from when they join until the job ends. Times
    are coarse, so that answers hold for a while."""

    change_s: float
    ends_s: float | None
    risk: DeathRisk


def _costs(context: Context) -> _Costs:
    state, timing = context.state, context.timing
    ends_s = worth.rest_s(context) - worth.join_s(state)
    return _Costs(
        change_s=worth.coarse(worth.change_s(state, timing)),
        ends_s=None if math.isinf(ends_s) else worth.coarse(ends_s) if ends_s > 0 else 0.0,
        risk=worth.risk(state, context.now, timing),
    )


def _is_awaited(context: Context, asked: Growth) -> bool:
    if asked.answer is not None or asked.failed:
        return False
    return context.now - asked.asked_at < context.timing.planning_timeout_s


def _slots(vm: str, workers: _Workers) -> tuple[WorkerSlot, ...]:
    return tuple(
        WorkerSlot(worker=f"{vm}.{index}", vm=vm, memory_bytes=each_bytes, slowdown=slowdown)
        for index, (each_bytes, slowdown) in enumerate(workers)
    )


# ---- what a VM would bring ---------------------------------------------------------------------------------


def _workers(context: Context, placement: Placement) -> tuple[list[_Workers], _Workers]:
    """(The workers of each VM that stays, as they are or are expected to be; those of one more VM.)"""
    state, staying = context.state, staying_vms(context.state)
    joined = {vm.vm: _known(state, vm) for vm in staying if vm.joined}

    @cache
    def coming(kind: _Kind | None) -> _Workers:
        return _expected(context, kind, joined)

    present = [joined[vm.vm] if vm.joined else coming(_kind_of(vm)) for vm in staying]
    return present, coming(_kind(placement))


def _expected(context: Context, kind: _Kind | None, joined: Mapping[str, _Workers]) -> _Workers:
    """The workers of a VM that has not joined yet: as those of other VMs of its type. For a type that the job
    never had, the memory is the offer's, and the speed that of the job's median worker."""
    state = context.state
    everyone = [worker for workers in joined.values() for worker in workers]
    alike = [it for vm, workers in joined.items() if _kind_of(state.vms[vm]) == kind for it in workers]
    slowdown = statistics.median([slowdown for _, slowdown in alike or everyone] or [1.0])
    ended = [vm for vm in state.vms.ended(-_REMEMBERED) if vm.devices and _kind_of(vm) == kind]
    known = alike or [worker for vm in ended for worker in _known(state, vm)]
    least_bytes = _offered_bytes(context, kind)
    if known or least_bytes is None:
        least_bytes = min((each_bytes for each_bytes, _ in known or everyone), default=0)
    return ((least_bytes, slowdown),) * context.spec.resources.workers_per_node


def _offered_bytes(context: Context, kind: _Kind | None) -> int | None:
    """What an offer says of each worker's memory; None: nothing."""
    resources = context.spec.resources
    for offer in context.observations.offers or ():
        each_bytes = offer.worker_bytes(resources.workers_per_node)
        if _kind(offer.placement) == kind and each_bytes is not None:
            return min(each_bytes, resources.device_memory or each_bytes)
    return None


def _kind(placement: Placement | None) -> _Kind | None:
    return (placement.provider, placement.instance_type) if placement is not None else None


def _kind_of(vm: Vm) -> _Kind | None:
    return _kind(vm.attempt.placement if vm.attempt is not None else None)


def _known(state: JobState, vm: Vm) -> _Workers:
    """The workers of a VM that has joined, except those that cannot meet the recipe."""
    assert state.spec is not None, "VMs are for submitted jobs"
    names = [f"{vm.vm}.{index}" for index in range(state.spec.resources.workers_per_node)]
    slots = [slot_of(state, worker) for worker in names if worker not in state.unfit]
    return tuple((slot.memory_bytes, slot.slowdown) for slot in slots)
