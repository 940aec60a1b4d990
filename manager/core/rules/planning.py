"""When the planner is asked, and for which workers; what is made of its answer: `answers`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....protocol.messages import WorkerReport
from .. import candidates, copies, fitness, worth
from ..commands import ComputePlan
from ..context import Context
from ..facts import HoldChanged, PlanImpossible
from ..observations import Planning
from ..pools import giving_up
from ..slots import slot_of
from ..state import Incarnation, vm_of
from ..strikes.table import Kind
from ..vms import VmStatus
from . import breaks, versions


def plan(context: Context) -> None:
    """Ask the planner when the workers that there are call for another plan than the one that runs."""
    state = context.state
    if not _is_wanted(context) or state.recipe is None or context.isolated or awaits_members(context):
        return
    ready = candidates.ready(context)
    if versions.give_way(context, ready):
        return
    usable = versions.alike(context, ready)
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
    if waiting or not may_plan(context):
        return
    if not candidates.enough(context, usable):
        _too_few(context)
        return
    if not usable:
        return
    retry_at = context.observations.retry_at
    if retry_at is not None and context.now >= retry_at:
        context.note(planned_for=frozenset(), retry_at=None)
    need = _need(context, incarnations)
    if need is not None and fitness.fix_bits(context, usable.values()):
        usable = versions.alike(context, candidates.ready(context))  # without those whose bits differ
        if not candidates.enough(context, usable):
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


def may_plan(context: Context) -> bool:
    """Whether a generation is wanted, and none is in preparation or forming."""
    state = context.state
    forms = state.current is not None and state.current.formed is None
    return _is_wanted(context) and state.planned is None and not forms


def _is_wanted(context: Context) -> bool:
    return context.state.active or context.must_save()


def awaits_members(context: Context) -> bool:
    """Whether some who run the generation are yet to be heard by this manager: they would be planned around
    and not told to switch, and the steps that they hold lost."""
    current = context.state.current
    return current is not None and bool(context.awaited(vm_of(worker) for worker, _ in current.incarnations))


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
    still = context.strikes(Kind.UNFIT_VM).count > 0  # no VM that came later took part
    unfit = [why for worker, why in state.unfit.items() if still or vm_of(worker) in state.vms.live]
    if unfit:
        reason += f"; {len(unfit)} workers cannot meet the recipe: {unfit[-1]}"
    if state.current is None and (state.last_generation > state.started_after or unfit):
        say_impossible(context, reason)
    _hold_if_noticed(context, reason)


def _hold_if_noticed(context: Context, reason: str) -> None:
    """Have a checkpoint made before the cloud takes VMs that the plan cannot do without."""
    state = context.state
    if state.hold or state.current is None or giving_up.keep_needed(context):
        return
    if context.noticed(state.current.incarnations):
        context.fact(HoldChanged(at=context.now, hold=True, reason=reason))


def _ask(
    context: Context,
    usable: Mapping[Incarnation, WorkerReport],
    cause: str,
    detected_at: float,
    *,
    reconsider: bool,
    least_gain: float = 0.0,
) -> None:
    state = context.state
    generation = state.last_generation + 1
    # Asked again after a restart or a timeout, the question may be another: its key has the time in it.
    key = f"{state.job}/plan/{generation}/{round(context.now * 1000)}"
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
    asked = Planning(key, generation, frozenset(usable), context.now, cause, detected_at, reconsider)
    context.note(planning=asked, retry_at=None)


def say_impossible(context: Context, reason: str) -> None:
    if context.state.impossible != reason:
        number = context.state.last_generation + 1
        context.fact(PlanImpossible(at=context.now, generation=number, reason=reason))
