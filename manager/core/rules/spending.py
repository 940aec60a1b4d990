"""What a job may cost: an hour, and in all. Both are held at ceilings, for every VM until it is gone.

Of its budget a job keeps what saving and releasing may cost, and what its VMs may cost until they end
themselves once their manager is lost; more while a release is refused, for the others may be as slow. When no
more than that is left it saves and stops; when it has no time left to save either, it ends as it is.

While VMs are paid for, the journal has a fact every few minutes. A longer gap is one without a manager, in
which VMs end themselves: they cost nothing beyond that, unless they are seen again.
"""

from __future__ import annotations

from ..context import Context
from ..cost import hourly_ceiling, spent_by
from ..events import ManagerStarted, ReleaseRefused, Tick
from ..facts import CostNoted, EndReason, JobEnded, ManagerAway, VmNotReleased, VmSeen
from ..vms import Vm
from . import ending

SPENT = "the budget pays for no more VMs"
_ROUNDING = 1e-9
_UNLISTED_S = 60.0  # what was created so shortly before a manager died may have been in no list


def fault(context: Context, ceiling: float) -> str:
    """Why VMs of this ceiling would be too much beside those that there are; empty if they would not."""
    resources, hourly = context.spec.resources, hourly_ceiling(context.state) + ceiling
    most, budget = resources.max_hourly_cost, resources.budget
    if most is not None and hourly > most + _ROUNDING:
        return f"one more VM would pass resources.max_hourly_cost ({most:g} USD)"
    if budget is None:
        return ""
    left = budget - spent_by(context.state, context.now).at_most
    paid_s = context.timing.least_paid_s + _slow_release_s(context)
    return SPENT if hourly * paid_s / 3600.0 > left + _ROUNDING else ""


def take(context: Context) -> None:
    """Time has passed, with a manager or without one. Or a release is refused, which is told once."""
    if isinstance(context.event, ReleaseRefused):
        _note_refusal(context, context.event)
    since_s = context.now - context.state.told_at
    began = isinstance(context.event, ManagerStarted)
    if (began or since_s >= context.timing.note_every_s) and any(map(_is_paid, context.state.counted_vms)):
        _note_time(context, since_s)
    for vm in context.state.counted_vms:
        if vm.must_end_by is not None and _reported_since(context, vm):
            context.fact(VmSeen(at=context.now, vm=vm.vm, lives=True))


def _note_time(context: Context, since_s: float) -> None:
    """The newest fact is `since_s` old. With a manager there was another after `note_every_s`.

    If the clock was set back since, it is not known for how long there was none.
    """
    state, timing = context.state, context.timing
    told_until = state.told_at + timing.note_every_s
    is_away = since_s > timing.note_every_s + timing.end_reserve_s
    paid = [vm for vm in state.counted_vms if _is_paid(vm)]
    if since_s < 0.0:
        context.fact(CostNoted(at=context.now, unseen_s=timing.end_reserve_s, until=told_until))
    if is_away or (isinstance(context.event, ManagerStarted) and not all(vm.existed for vm in paid)):
        ending = [vm for vm in paid if is_away and vm.attempt is not None and vm.attempt.ends_itself]
        must_end = {
            vm.vm: told_until + (timing.unjoined_after_s if vm.joined_at is None else timing.end_reserve_s)
            for vm in ending
        }
        unwatched_s = (
            timing.unjoined_after_s if since_s < 0.0 else min(since_s + _UNLISTED_S, timing.unjoined_after_s)
        )
        context.fact(ManagerAway(at=context.now, must_end=must_end, unwatched_s=unwatched_s))
    if since_s >= timing.note_every_s:
        context.fact(CostNoted(at=context.now))


def _is_paid(vm: Vm) -> bool:
    return vm.attempted_at is not None and vm.price is not None and vm.price.ceiling > 0.0


def _reported_since(context: Context, vm: Vm) -> bool:
    last_report = context.observations.last_reports.get(vm.vm)
    return last_report is not None and vm.must_end_by is not None and last_report.at > vm.must_end_by


def _note_refusal(context: Context, event: ReleaseRefused) -> None:
    vm = context.state.leaving.get(event.vm)
    if vm is None or vm.not_released or vm.attempted_at is None or vm.price is None or not vm.price.ceiling:
        return
    context.fact(
        VmNotReleased(at=context.now, vm=vm.vm, message=event.error, hourly_at_most=vm.price.ceiling)
    )


def _slow_release_s(context: Context) -> float:
    """How much longer than expected the slowest release takes that is under way and was refused, so far."""
    since = [vm.ended_at for vm in context.state.leaving.values() if vm.not_released]
    longest_s = max((context.elapsed_s(at) for at in since if at is not None), default=0.0)
    return max(0.0, min(longest_s, context.timing.slowest_release_s) - context.timing.release_s)


def _budget(context: Context) -> float | None:
    return context.state.spec.resources.budget if context.state.spec is not None else None


def keep_budget(context: Context) -> None:
    """Save and stop while that can still be paid for."""
    budget, hourly = _budget(context), hourly_ceiling(context.state)
    if budget is None or hourly == 0.0 or not isinstance(context.event, Tick):
        return
    state = context.state
    left_s = (budget - spent_by(state, context.now).at_most) / hourly * 3600.0
    end_s = context.timing.end_reserve_s + _slow_release_s(context)
    if left_s > end_s + context.timing.stop_timeout_s:
        return
    why = f"its budget of {budget:g} USD is spent, but for what ending costs"
    if state.finished is not None:
        for vm in state.live_vms:  # the weights are exported without them
            context.end_vm(vm.vm, EndReason.RELEASED, why)
        return
    if state.stop_ordered_at is None:
        order_stop(context, why)
    if left_s <= end_s:
        ending.end_stopped(context, "the budget left no time to save")


def order_stop(context: Context, why: str) -> None:
    """The job saves and stops, for this reason."""
    ending.order_stop(context, JobEnded(at=context.now, status="stopped", reason=why))
