"""When the planner is asked, for which workers, and what is made of its answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ....pipeline.plan import Plan
from ....protocol.messages import Phase, WorkerReport
from .. import copies, worth
from ..commands import ComputePlan
from ..context import Context, has_ended, incarnation_of
from ..events import JobCommandFailed, PlanComputed
from ..facts import GenerationPlanned, HoldChanged, PlanImpossible, PlanKept
from ..observations import Planning
from ..slots import slot_of
from ..state import Generation, Incarnation, vm_of
from ..vms import Vm, VmStatus
from . import breaks, fitness, versions

# One that was idle before it ever took part holds nothing; one that left has handed over what it had.
_HOLDS_STATE = (Phase.IDLE, Phase.FORMING, Phase.RUNNING, Phase.BROKEN, Phase.HELD, Phase.FINISHED)
_READY = (Phase.LEFT, *_HOLDS_STATE)


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
    if not _wanted(context) or state.planned is not None or not _settled(state.current):
        return
    if _awaits_members(context):
        return  # asked by the manager before
    if _stays(context, event, asked):
        _keep(context, event, asked)
        return
    if event.plan is None:
        if asked is not None:
            context.note(planned_for=asked.incarnations)
            _say_impossible(context, event.reason or "the planner gave no reason")
        return
    _accept(context, event, event.plan, asked)


def _take_failure(context: Context, event: JobCommandFailed) -> None:
    """Where no generation runs, the job ends for it (`ending`); one that runs goes on, as where no plan can
    take its place, and the planner is asked again."""
    asked, state = context.observations.planning, context.state
    if asked is None or not state.running or event.key != _key(state.job, asked.generation, asked.asked_at):
        return
    retry_at = context.now + context.timing.replan_s
    context.note(planning=None, planned_for=asked.incarnations, retry_at=retry_at)
    _say_impossible(context, f"{event.command}: {event.error}")


def _is_about(event: PlanComputed, asked: Planning) -> bool:
    return event.asked == frozenset(worker for worker, _ in asked.incarnations)


def _take_late(context: Context, event: PlanComputed, asked: Planning) -> None:
    """The answer to an earlier question than the one that is pending: good while its workers are there."""
    if not _wanted(context) or context.state.planned is not None or not _settled(context.state.current):
        return
    if asked.reconsider and event.current_s is None:
        return  # it was asked when nothing ran that could stay
    if event.plan is not None and not _stays(context, event, asked):
        _accept(context, event, event.plan, asked)


def plan(context: Context) -> None:
    """Ask the planner when the workers that there are call for another plan than the one that runs."""
    state = context.state
    if not _wanted(context) or state.recipe is None or context.isolated:
        return
    if _awaits_members(context):
        return
    ready = _ready(context)
    if versions.give_way(context, ready, partial(_enough, context)):
        return
    usable = versions.alike(context, ready, partial(_enough, context))
    incarnations = frozenset(usable)
    if incarnations - context.observations.usable:
        context.note(grown_at=context.now)
    context.note(usable=incarnations)
    asked = context.observations.planning
    # If workers of the pending question are gone meanwhile, the planner is asked again.
    waiting = (
        asked is not None
        and asked.incarnations <= incarnations
        and context.now - asked.asked_at < context.timing.planning_timeout_s
    )
    if waiting or state.planned is not None or not _settled(state.current):
        return
    if not _enough(context, usable):
        _too_few(context)
        return
    if not usable:
        return
    retry_at = context.observations.retry_at
    if retry_at is not None and context.now >= retry_at:
        context.note(planned_for=frozenset(), retry_at=None)
    need = _need(context, incarnations)
    if need is not None and fitness.fix_bits(context, usable.values()):
        usable = _usable(context)  # without those whose bits differ
        if not _enough(context, usable):
            return
    if need is not None:
        _ask(context, usable, *need, reconsider=_could_stay(context, incarnations))
    elif _paces_changed(context):
        context.note(reconsidered_at=context.now)
        _ask(
            context,
            usable,
            "paces changed",
            state.paces_changed_at,
            reconsider=True,
            least_gain=context.timing.worth_it,
        )
    elif _outlasted(context):
        context.note(reconsidered_at=context.now)
        _ask(
            context, usable, "the plan has run for as long as it was chosen for", context.now, reconsider=True
        )
    elif incarnations == context.observations.planned_for:
        _hold_if_noticed(context, "no plan does without the VMs that are under notice")


def _enough(context: Context, usable: Iterable[Incarnation]) -> bool:
    """Whether these workers may train; to save what they hold, any number will do."""
    num_vms = len({vm_of(worker) for worker, _ in usable})
    return num_vms >= context.spec.resources.min_nodes or not context.state.active or _only_saves(context)


def _wanted(context: Context) -> bool:
    return context.state.active or context.must_save()


def _settled(current: Generation | None) -> bool:
    return current is None or current.formed is not None


def _awaits_members(context: Context) -> bool:
    """Whether some who run the generation are yet to be heard by this manager: they would be planned around
    and not told to switch, and the steps that they hold lost."""
    current = context.state.current
    return current is not None and bool(context.awaited(vm_of(worker) for worker, _ in current.incarnations))


def _usable(context: Context) -> dict[Incarnation, WorkerReport]:
    """The workers that a plan may use, by incarnation."""
    return versions.alike(context, _ready(context), partial(_enough, context))


def _ready(context: Context) -> dict[Incarnation, WorkerReport]:
    """The workers of all versions that some plan may use, in the order in which their VMs were requested.

    To save what is held, also those that are to hand over will do: they live.
    """
    saves = context.must_save() or _only_saves(context)
    return {
        incarnation_of(worker): worker
        for vm, worker in context.reports()
        if (vm.status is VmStatus.JOINED or (saves and vm.joined)) and _is_usable(context, vm, worker)
    }


def _only_saves(context: Context) -> bool:
    """Whether too few VMs stay to train on, and steps are held that no checkpoint has: they are saved before
    the other VMs go."""
    state = context.state
    if not state.active or state.current is not None:
        return False
    if not any(vm.status is VmStatus.NOTICED for vm in state.live_vms):
        return False
    staying = {
        vm.vm
        for vm, worker in context.reports()
        if vm.status is VmStatus.JOINED and _is_usable(context, vm, worker)
    }
    return len(staying) < context.spec.resources.min_nodes and context.held_step() > state.saved_step


def _is_usable(context: Context, vm: Vm, worker: WorkerReport) -> bool:
    state, incarnation = context.state, incarnation_of(worker)
    if worker.phase not in _READY or has_ended(worker) or worker.worker in state.unfit:
        return False
    if state.has_failed(incarnation):
        return False
    if worker.phase is Phase.IDLE and (state.recipe is None or worker.graph_hash != state.recipe.graph_hash):
        return False  # it has not traced the model under the recipe yet
    if worker.phase is Phase.IDLE and not fitness.is_shown(state, worker):
        return False
    if context.observations.left_out.get(incarnation, context.now) > context.now:
        return False
    if vm.vm in context.observations.unheard:
        return False
    # With nothing running, a closed connection is reason enough not to count on a VM.
    return state.current is not None or context.observations.last_reports[vm.vm].closed_at is None


def _need(context: Context, incarnations: frozenset[Incarnation]) -> tuple[str, float] | None:
    """Why another plan is needed and when that was seen; None: it is not, or not yet."""
    state, observations, timing = context.state, context.observations, context.timing
    current = state.current
    if current is None:
        retry = context.now - observations.answered_at >= timing.replan_s
        if (
            not (incarnations - observations.planned_for or retry)
            or _expecting_word(context)
            or breaks.rests(context, incarnations)
        ):
            return None
        begins = state.last_generation == state.started_after
        if begins and _gathering(context, incarnations):
            return None
        cause = "workers are back" if not begins else "resumed" if state.started_after else "start"
        return observations.cause or (cause, context.now)
    if context.fenced_off:
        retry = context.now - observations.answered_at >= timing.replan_s
        if incarnations == observations.planned_for and not retry:
            return None
        return observations.cause or ("its checkpoints are fenced off", context.now)
    noticed = [worker for worker, _ in context.noticed(current.incarnations)]
    if noticed and incarnations != observations.planned_for:
        return f"notice for {', '.join(noticed)}", context.now
    if context.unheard(current.incarnations):
        return None  # they could not be told to switch: what steps would be cut off
    newcomers = incarnations - observations.planned_for - set(current.incarnations)
    if newcomers and not _gathering(context, incarnations):
        return f"{', '.join(sorted(worker for worker, _ in newcomers))} joined", observations.grown_at
    return None


def _could_stay(context: Context, incarnations: frozenset[Incarnation]) -> bool:
    """Whether the plan that runs could go on, so that it is one of those to choose from."""
    current = context.state.current
    if current is None or context.fenced_off:
        return False
    return incarnations.issuperset(current.incarnations)


def _paces_changed(context: Context) -> bool:
    """Whether workers or sections turned out slower or faster than they were when the plan was made."""
    current = context.state.current
    changed_at = context.state.paces_changed_at
    if current is None or not context.state.active or context.unheard(current.incarnations):
        return False
    if changed_at > context.now and context.observations.reconsidered_at > 0:
        return False  # the clock was set back before this manager began; it has asked once
    return changed_at > max(current.planned_at, context.observations.reconsidered_at)


def _outlasted(context: Context) -> bool:
    """Whether a plan has run for as long as it was chosen for, or kept, and nothing else has replaced it."""
    current, kept_until = context.state.current, context.observations.kept_until
    if current is None or not context.state.active or context.unheard(current.incarnations):
        return False
    until = current.best_until if kept_until is None else kept_until
    return until is not None and context.now >= until > context.observations.reconsidered_at


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


def _gathering(context: Context, incarnations: frozenset[Incarnation]) -> bool:
    """Whether more workers are about to be ready, so that one plan can take them all in."""
    ready = {vm_of(worker) for worker, _ in incarnations}
    awaited = (vm.vm for vm in context.state.live_vms if vm.status is not VmStatus.NOTICED)
    coming = any(vm not in ready and vm not in context.observations.unheard for vm in awaited)
    return coming and context.now - context.observations.grown_at < context.timing.settle_s


def _expecting_word(context: Context) -> bool:
    """Whether VMs may soon tell whether they are alive: after a restart, or when connections just closed."""
    for vm in context.state.live_vms:
        last_report = context.observations.last_reports.get(vm.vm)
        if vm.vm in context.observations.unheard:
            continue
        if vm.joined and last_report is None:
            return True  # until its first report, or its lease ends
        closed_at = last_report.closed_at if last_report is not None else None
        if closed_at is not None and context.now - closed_at < context.reconnection_s():
            return True
    return False


def _too_few(context: Context) -> None:
    state = context.state
    reason = f"fewer usable VMs than min_nodes ({context.spec.resources.min_nodes})"
    still = state.unfit_rounds.count > 0  # no VM that came later took part
    unfit = [why for worker, why in state.unfit.items() if still or vm_of(worker) in state.vms.live]
    if unfit:
        reason += f"; {len(unfit)} workers cannot meet the recipe: {unfit[-1]}"
    if state.current is None and (state.last_generation > state.started_after or unfit):
        _say_impossible(context, reason)
    _hold_if_noticed(context, reason)


def _hold_if_noticed(context: Context, reason: str) -> None:
    """Have a checkpoint made before the cloud takes VMs that the plan cannot do without."""
    state = context.state
    if state.hold or state.current is None:
        return
    if context.noticed(state.current.incarnations):
        context.fact(HoldChanged(at=context.now, hold=True, reason=reason))


def _say_impossible(context: Context, reason: str) -> None:
    if context.state.impossible != reason:
        number = context.state.last_generation + 1
        context.fact(PlanImpossible(at=context.now, generation=number, reason=reason))


def _ask(
    context: Context,
    usable: dict[Incarnation, WorkerReport],
    cause: str,
    detected_at: float,
    *,
    reconsider: bool,
    least_gain: float = 0.0,
) -> None:
    state = context.state
    generation = state.last_generation + 1
    key = _key(state.job, generation, context.now)
    slots = tuple(slot_of(state, worker) for worker, _ in usable)
    ends_s = worth.ends_s(context, {vm_of(worker) for worker, _ in usable})
    context.command(
        ComputePlan(
            key=key,
            generation=generation,
            workers=slots,
            reconsider=reconsider,
            lasts_s=None if reconsider else worth.lasts_s(context, ends_s),
            ends_s=ends_s if math.isfinite(ends_s) else None,
            fewer_copies_s=copies.fewer_for_s(context),
            change_s=worth.formed_s(state),
            least_gain=least_gain,
            risk=worth.risk(state, context.now, context.timing),
        )
    )
    asked = Planning(generation, frozenset(usable), context.now, cause, detected_at, reconsider)
    context.note(planning=asked, retry_at=None)


def _key(job: str, generation: int, asked_at: float) -> str:
    """Asked again after a restart or a timeout, the question may be another: its key has the time in it."""
    return f"{job}/plan/{generation}/{round(asked_at * 1000)}"


def _accept(context: Context, event: PlanComputed, value: dict[str, Any], asked: Planning | None) -> None:
    """Plan the generation, if all of its workers are still there."""
    usable = _usable(context)
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
    saves_only = context.must_save() or _only_saves(context)
    context.note(planned_for=considered)
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
            members=(*incarnations, *_donors(context, incarnations, usable)),
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


def _donors(
    context: Context, incarnations: tuple[Incarnation, ...], usable: Mapping[Incarnation, WorkerReport]
) -> list[Incarnation]:
    """Living workers outside the plan that may hold sections that others need."""
    used = set(incarnations)
    spoken = {usable[incarnation].trainer_protocol for incarnation in incarnations}
    return [
        incarnation_of(worker)
        for _, worker in context.reports()
        if worker.phase in _HOLDS_STATE
        and worker.trainer_protocol in spoken
        and worker.generation > 0
        and incarnation_of(worker) not in used
        and not context.is_away(incarnation_of(worker))
        and context.observations.left_out.get(incarnation_of(worker), context.now) <= context.now
    ]
