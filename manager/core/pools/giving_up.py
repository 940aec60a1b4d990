"""VMs that a job gives up: beyond its share of a pool, after too long a wait at a cost, or for cheaper ones.

A job that trains hands its VMs over by a planned change; if no plan does without them, it keeps them. One
that waits for more VMs keeps those that it has for a while; then they save what they hold, and go. The share
itself is computed by `shares`.
"""

from __future__ import annotations

from ...spec.placement import Market, Placement
from ...spec.resources import CLOUDS
from ..context import Context
from ..events import Tick
from ..facts import EndReason, VmYielded
from ..state import vms_of
from ..strikes.table import Kind
from ..vms import Vm
from .claims import kept_vms, least_vms, pool_of_vm
from .shares import pool_of

_FOR_OTHERS = "given up for jobs that wait"
_TOO_DEAR = "waited in vain for others"
_STAND_IN = "a spot VM may take its place"


def why_no_more(context: Context, placement: Placement) -> str:
    """Why the job asks for no more VMs there; empty if its share allows more."""
    pool, share = pool_of(placement), context.observations.share
    most = share.most.get(pool)
    if most is None or sum(pool_of_vm(vm) == pool for vm in kept_vms(context.state)) < most:
        return ""
    return share.why


def give_up(context: Context) -> None:
    """VMs beyond the share, and those of clouds that have waited too long for others."""
    state = context.state
    if not isinstance(context.event, Tick) or not state.active or context.isolated:
        return
    for pool, most in context.observations.share.most.items():
        held = [vm for vm in kept_vms(state) if pool_of_vm(vm) == pool]
        for vm in sorted(held, key=lambda vm: _is_used(context, vm))[: max(0, len(held) - most)]:
            _give_up(context, vm, _FOR_OTHERS)
    if _has_cost_too_much(context):
        context.strike(Kind.SHORT)
        for vm in kept_vms(context.state):
            if _is_of_a_cloud(vm):
                _give_up(context, vm, _TOO_DEAR)


def replace_stand_ins(context: Context) -> None:
    """Have on-demand VMs that stand in for spot VMs hand over, one at a time: a spot VM is asked for instead,
    and if there is none an on-demand VM again.

    That is tried once in `grow_again_s`; once a spot VM has come, after it has stayed for `on_demand_after`.
    """
    state, resources = context.state, context.spec.resources
    if not isinstance(context.event, Tick) or not state.active or not resources.spot or not state.running:
        return
    kept = kept_vms(state)
    stand_ins = [vm for vm in kept if vm.joined and _is_stand_in(vm)]
    settled = _may_hand_over(context) and len(kept) == len(state.live_vms) and all(vm.joined for vm in kept)
    if (
        not stand_ins
        or not settled
        or context.isolated
        or len(kept) <= least_vms(state, context.observations)
    ):
        return
    newest = max(vm.joined_at or 0.0 for vm in kept)
    wait_s = resources.on_demand_after_s
    if state.spot_absent_since is not None:
        wait_s = max(wait_s, context.timing.grow_again_s)
    if context.elapsed_s(newest) > wait_s:
        context.fact(VmYielded(at=context.now, vm=stand_ins[-1].vm, why=_STAND_IN))


def _is_stand_in(vm: Vm) -> bool:
    return _is_of_a_cloud(vm) and vm.attempt is not None and vm.attempt.placement.market is Market.ON_DEMAND


def keep_needed(context: Context) -> bool:
    """Keep what was to be given up for others, as no plan does without it; returns whether there was any."""
    state = context.state
    current = state.current
    if current is None:
        return False
    needed = [vm for vm in state.live_vms if vm.yielded and vm.vm in vms_of(current)]
    for vm in needed:
        context.fact(VmYielded(at=context.now, vm=vm.vm, stays=True))
    if needed:
        context.note(planned_for=frozenset(), cause=None)
    return bool(needed)


def _is_used(context: Context, vm: Vm) -> tuple[bool, bool, int]:
    """Those that are given up first come first: on their way, without work in the plan, the newest."""
    current = context.state.current
    return vm.joined, current is not None and vm.vm in vms_of(current), -vm.number


def _give_up(context: Context, vm: Vm, why: str) -> None:
    if not vm.joined:
        context.end_vm(vm.vm, EndReason.RELEASED, why)
    elif _may_hand_over(context):
        context.fact(VmYielded(at=context.now, vm=vm.vm, why=why))


def _may_hand_over(context: Context) -> bool:
    """Whether a plan that runs can be changed, or nothing has run for long."""
    state, observations, timing = context.state, context.observations, context.timing
    if state.current is not None:
        return state.running and state.planned is None and observations.planning is None
    return context.is_paused(Kind.SHORT) or context.elapsed_s(_waits_since(context)) > timing.keep_waiting_s


def _waits_since(context: Context) -> float:
    """Since when nothing runs though VMs are there."""
    state = context.state
    ended_at = state.history[-1].ended_at if state.history else None
    joined_at = [vm.joined_at for vm in state.live_vms if vm.joined_at is not None]
    return max([ended_at or 0.0, *joined_at])


# ---- what waiting costs ------------------------------------------------------------------------------------


def _waiting_on_clouds(context: Context) -> list[Vm]:
    """VMs of clouds that have joined and wait for others, none of which is on its way."""
    state = context.state
    kept = kept_vms(state)
    joined = [vm for vm in kept if vm.joined]
    if state.current is not None or state.planned is not None:
        return []
    if len(joined) >= least_vms(state, context.observations) or any(vm.id and not vm.joined for vm in kept):
        return []
    return [vm for vm in joined if _is_of_a_cloud(vm)]


def _is_of_a_cloud(vm: Vm) -> bool:
    return vm.attempt is not None and vm.attempt.placement.provider in CLOUDS


def _has_cost_too_much(context: Context) -> bool:
    """Whether VMs of clouds have cost as much since something ran as the least number of them does in
    `keep_waiting_s`, or the others would have come by now."""
    waiting = _waiting_on_clouds(context)
    if not waiting:
        return False
    state, timing = context.state, context.timing
    ended_at = state.history[-1].ended_at if state.history else None
    since = max(ended_at or 0.0, context.strikes(Kind.SHORT).since)
    spent = most_hourly = 0.0  # USD, times 3600
    for vm in (*waiting, *(vm for vm in state.vms.values() if (vm.ended_at or 0.0) > since)):
        if vm.joined_at is not None and vm.price is not None and _is_of_a_cloud(vm):
            until = context.now if vm.ended_at is None else vm.ended_at
            spent += vm.price.hourly * max(0.0, until - max(since, vm.joined_at))
            most_hourly = max(most_hourly, vm.price.hourly)
    allowed = most_hourly * least_vms(state, context.observations) * timing.keep_waiting_s
    newest_s = min(context.elapsed_s(max(since, vm.joined_at or 0.0)) for vm in waiting)
    return spent > allowed or newest_s > timing.request_timeout_s
