"""What is made of the planner's answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ....pipeline.plan import Plan
from .. import candidates, copies
from ..context import Context
from ..events import JobCommandFailed, PlanComputed
from ..facts import GenerationPlanned, PlanKept
from ..observations import Planning
from ..state import Incarnation, vm_of
from . import planning, versions


def take(context: Context) -> None:
    """The planner's answer: plan the generation, or say why none can run."""
    event, state = context.event, context.state
    if isinstance(event, JobCommandFailed) and event.command == "compute_plan":
        _take_failure(context, event)
        return
    if not isinstance(event, PlanComputed) or event.generation != state.last_generation + 1:
        return
    asked = context.observations.planning
    if asked is not None and not _is_about(event, asked):
        _take_late(context, event, asked)
        return
    context.note(planning=None, answered_at=context.now)
    if not planning.may_plan(context):
        return
    if planning.awaits_members(context):
        return  # asked by the manager before
    if _stays(context, event, asked):
        _keep(context, event, asked)
        return
    if event.plan is None:
        if asked is not None:
            context.note(planned_for=asked.incarnations, needed_vms=1 + _num_vms(asked.incarnations))
            planning.say_impossible(context, event.reason or "the planner gave no reason")
        return
    _accept(context, event, event.plan, asked)


def _num_vms(incarnations: Iterable[Incarnation]) -> int:
    return len({vm_of(worker) for worker, _ in incarnations})


def _take_failure(context: Context, event: JobCommandFailed) -> None:
    """Where no generation runs, the job ends for it (`ending`); one that runs goes on, as where no plan can
    take its place, and the planner is asked again."""
    asked = context.observations.planning
    if asked is None or not context.state.running or event.key != asked.key:
        return
    retry_at = context.now + context.timing.replan_s
    context.note(planning=None, planned_for=asked.incarnations, retry_at=retry_at)
    planning.say_impossible(context, f"{event.command}: {event.error}")


def _take_late(context: Context, event: PlanComputed, asked: Planning) -> None:
    """The answer to an earlier question than the one that is pending: good while its workers are there."""
    if not planning.may_plan(context):
        return
    if asked.reconsider and event.current_s is None:
        return  # it was asked when nothing ran that could stay
    if event.plan is not None and not _stays(context, event, asked):
        _accept(context, event, event.plan, asked)


def _is_about(event: PlanComputed, asked: Planning) -> bool:
    return event.asked == frozenset(worker for worker, _ in asked.incarnations)


def _stays(context: Context, event: PlanComputed, asked: Planning | None) -> bool:
    """Whether the plan that runs goes on: no other is worth more, or has copies that are wanted."""
    if context.state.current is None or not event.stays or (asked is not None and not asked.reconsider):
        return False
    return event.plan is None or not copies.gains_copies(context, event.plan, event.workers)


def _keep(context: Context, event: PlanComputed, asked: Planning | None) -> None:
    """Go on with what runs; say so, unless the same was said of it last."""
    current = context.state.current
    assert current is not None, "what stays runs"
    about = current.number, tuple((one.name, one.shape) for one in event.alternatives[:2])
    cause, planned_for = "replanned", context.observations.planned_for
    if asked is not None:
        cause, planned_for = asked.cause, asked.incarnations
    if about != context.observations.kept:
        context.fact(
            PlanKept(
                at=context.now,
                generation=current.number,
                cause=cause,
                until=event.best_until,
                alternatives=event.alternatives,
            )
        )
    context.note(planned_for=planned_for, cause=None, kept=about, kept_until=event.best_until)


def _accept(context: Context, event: PlanComputed, value: dict[str, Any], asked: Planning | None) -> None:
    """Plan the generation, if all of its workers are still there."""
    usable = versions.alike(context, candidates.ready(context))
    ready = {incarnation.worker: incarnation for incarnation in usable}
    if any(worker not in ready for worker in event.workers) or _left_out_member(context, event, ready):
        return
    incarnations = tuple(ready[worker] for worker in event.workers)
    # Raises for an invalid plan: that is a fault of our planner.
    plan = Plan.from_json(value)
    assert plan.num_workers == len(incarnations), "the planner names one worker for each rank"
    if asked is not None and _is_about(event, asked):
        considered = asked.incarnations
    else:
        considered = frozenset(incarnation for worker, incarnation in ready.items() if worker in event.asked)
    # Asked before the answer is noted: after that, what was impossible before would seem to be so still.
    saves_only = candidates.saves(context)
    needed_vms = min(context.observations.needed_vms, _num_vms(considered))
    context.note(planned_for=considered, needed_vms=needed_vms)
    if _is_same(context, value, incarnations):
        context.note(cause=None)
        return
    cause, detected_at = (asked.cause, asked.detected_at) if asked is not None else ("replanned", context.now)
    alternatives, best_until = event.alternatives, event.best_until
    if event.stays:  # it was worth most to go on, but for the copies that the plan brings
        alternatives = tuple(sorted(alternatives, key=lambda one: one.name == "running"))
        best_until = None
    context.fact(
        GenerationPlanned(
            at=context.now,
            number=event.generation,
            cause=cause,
            plan=value,
            members=(*incarnations, *candidates.donors(context, incarnations, usable)),
            predicted_s=event.predicted_s,
            detected_at=detected_at,
            decided_s=context.now - asked.asked_at if asked is not None else 0.0,
            saves_only=saves_only,
            best_until=best_until,
            alternatives=alternatives,
        )
    )
    context.note(cause=None, planning=None, kept=None, kept_until=None)


def _left_out_member(context: Context, event: PlanComputed, ready: Mapping[str, Incarnation]) -> bool:
    """Whether the question left out a worker of the plan that runs, on which one can count again: its notice
    was withdrawn."""
    current = context.state.current
    if current is None:
        return False
    return any(
        ready.get(incarnation.worker) == incarnation and incarnation.worker not in event.asked
        for incarnation in current.incarnations
    )


def _is_same(context: Context, value: dict[str, Any], incarnations: tuple[Incarnation, ...]) -> bool:
    """Whether the answer is what already runs, so that nothing needs to move."""
    current = context.state.current
    if current is None or context.fenced_off or set(incarnations) != set(current.incarnations):
        return False
    return {**value, "generation": 0} == {**current.plan, "generation": 0}
