"""How facts about attempts to have VMs, and about VMs that are gone, change a job's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...spec.placement import Market, Placement
from ...spec.resources import CLOUDS
from ..cost import bill, bill_for, noted
from ..facts import (
    AttemptMade,
    AttemptRefused,
    CostNoted,
    EndReason,
    ManagerAway,
    RefusalKind,
    VmCreated,
    VmGone,
    VmNotReleased,
    VmSeen,
)
from ..state import Generation, JobState, vms_of
from ..strikes.ledger import JOB, Subject, forgive_on_progress, strike
from ..strikes.table import Kind, Progress
from ..vms import Bill, Enough, Losses, Spent, Vm

_TOGETHER_S = 60.0  # VMs that are lost within so long are one loss: a cloud takes several
_LOST = (
    EndReason.PREEMPTED,
    EndReason.LEASE_EXPIRED,
    EndReason.PEERS_LOST_IT,
    EndReason.LEFT,
    EndReason.WORKERS_DIED,
    EndReason.CUT_OFF,
)


def place_of(placement: Placement, kind: RefusalKind) -> str:
    """What a refusal of this kind is about: quotas hold in all zones, credentials in a region."""
    if kind is RefusalKind.CREDENTIALS:
        return "/".join((kind, placement.provider, placement.region))
    zone = "" if kind is RefusalKind.QUOTA else placement.zone
    parts = (placement.provider, placement.region, zone, placement.instance_type, placement.market)
    return "/".join((kind, *parts))


def strikes_of(kind: RefusalKind) -> Kind:
    """How a refusal is counted: quotas and rights may be changed by a person meanwhile."""
    return Kind.LIMITED if kind in (RefusalKind.QUOTA, RefusalKind.NOT_ALLOWED) else Kind.REFUSED


def origin_of(provider: str, image: str, manager_url: str) -> str:
    """What decides whether a VM of a cloud can join: from where it comes, what it boots, where it reports."""
    return f"{provider}/{image}/{manager_url}"


def with_joined(state: JobState, vm: Vm) -> JobState:
    """VMs of its origin can join."""
    origin = vm_origin(vm)
    if origin is None or vm.attempt is None:
        return state.changed(strikes=forgive_on_progress(state.strikes, Progress.JOINED, {JOB}))
    place = place_of(vm.attempt.placement, RefusalKind.ENDED)
    strikes = forgive_on_progress(state.strikes, Progress.JOINED, {JOB, origin, place})
    return state.changed(joined_from=state.joined_from | {origin}, strikes=strikes)


def with_taken(state: JobState, vm: Vm, at: float, step: int, why: str) -> JobState:
    """Its cloud took a VM that had joined, and no step was made with it: its place is left alone for a while.

    Unlike that of one that was taken before it joined, until a step is made: that others join is no progress.
    """
    if vm.attempt is None:
        return state
    place, began = place_of(vm.attempt.placement, RefusalKind.ENDED), vm.joined_at
    why = why or "its VMs were taken back"
    strikes = strike(state.strikes, Kind.TAKEN_VM, place, at, by=[vm.vm], began=began, step=step, why=why)
    return state.changed(strikes=strikes)


def is_unconfirmed(vm: Vm) -> bool:
    """Whether no cloud has ever said that it has the VM, which was asked for there."""
    return not vm.id and vm.attempted_at is not None and vm_origin(vm) is not None


def with_first_tried_alone(state: JobState) -> JobState:
    """A person has the job go on: from where VMs did not join, the first is tried alone again."""
    return state.changed(joined_from=state.joined_from - state.strikes.all(Kind.NOT_JOINED).keys())


def vm_origin(vm: Vm) -> str | None:
    """`origin_of` the VM; None if it is of no cloud."""
    if vm.attempt is None or vm.attempt.placement.provider not in CLOUDS:
        return None
    return origin_of(vm.attempt.placement.provider, vm.attempt.image, vm.manager_url)


def _with_not_joined(state: JobState, vm: Vm) -> JobState:
    """One more of its origin."""
    origin = vm_origin(vm)
    if origin is None or vm.attempted_at is None or vm.ended_at is None or is_unconfirmed(vm):
        return state
    strikes = strike(state.strikes, Kind.NOT_JOINED, origin, vm.ended_at, began=vm.attempted_at)
    return state.changed(strikes=strikes)


def with_enough(state: JobState, now: float) -> JobState:
    """The plan that runs has no use for a VM, which is about to end."""
    current, before = state.current, state.enough
    if current is None:
        return state
    if before is not None and before.since == now:
        return state  # released together with another
    return state.changed(enough=Enough(current.shape, len(vms_of(current)), now))


def without_enough(state: JobState, formed: Generation) -> JobState:
    """Another plan than the one that had no use for more VMs may have."""
    enough = state.enough
    if enough is None or (formed.shape, len(vms_of(formed))) == (enough.shape, enough.num_vms):
        return state
    return state.changed(enough=None)


def with_ended(state: JobState, vm: Vm, *, gone: bool, ran_s: float | None = None) -> JobState:
    """A VM has ended; it counts, and is paid for, until it is gone for certain."""
    if vm.reason is EndReason.REQUEST_FAILED:
        state = _with_not_joined(state, vm)
    if vm.reason in _LOST and vm.joined_at is not None and vm.ended_at is not None:
        state = _with_loss(state, vm.ended_at)
    if gone:
        assert vm.ended_at is not None, "it has ended"
        return _paid(state, vm, vm.ended_at, ran_s)
    return state.changed(leaving=MappingProxyType({**state.leaving, vm.vm: vm}))


def _with_loss(state: JobState, at: float) -> JobState:
    before = state.losses
    if before.count and before.at <= at <= before.at + _TOGETHER_S:
        return state.changed(losses=replace(before, num_vms=before.num_vms + 1))
    return state.changed(losses=Losses(before.count + 1, at, before.num_vms + 1))


def _attempt_made(state: JobState, fact: AttemptMade) -> JobState:
    vm = state.vms.live.get(fact.vm)
    if vm is None:
        return state
    return state.with_vm(
        replace(
            vm,
            attempt=fact.attempt,
            attempted_at=fact.at,
            price=fact.price,
            noted=Spent(),
            noted_at=None,
            existed=False,
            unwatched_s=0.0,
            must_end_by=None,
            manager_url=fact.manager_url,
        )
    )


def _attempt_refused(state: JobState, fact: AttemptRefused) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or vm.attempt is None or vm.attempt.number != fact.number or vm.attempted_at is None:
        return state
    placement = vm.attempt.placement
    strikes = strike(
        state.strikes,
        strikes_of(fact.kind),
        place_of(placement, fact.kind),
        fact.at,
        began=vm.attempted_at,
        why=fact.message,
    )
    state = state.changed(strikes=strikes)
    if fact.kind is RefusalKind.NO_ANSWER:
        return state  # there may be one, which is paid for
    if fact.kind is RefusalKind.ENDED:
        return _with_counted(state, fact.vm, existed=True)
    told = fact.kind is not RefusalKind.CREDENTIALS  # else whether there are any is not known
    if told and placement.market is Market.SPOT and state.spot_absent_since is None:
        state = state.changed(spot_absent_since=fact.at)
    if not vm.live:  # it was given up meanwhile, and of its attempt nothing exists after all
        return state.changed(leaving=_without(state.leaving, vm.vm))
    return state.with_vm(replace(vm, attempted_at=None, price=None))


def _created(state: JobState, fact: VmCreated) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or vm.attempt is None or vm.attempt.number != fact.number:
        return state
    placement = vm.attempt.placement
    kinds = set(RefusalKind) - {RefusalKind.ENDED}  # one that is created may be taken back as the last was
    places: set[Subject] = {place_of(placement, kind) for kind in kinds}
    state = state.changed(strikes=forgive_on_progress(state.strikes, Progress.CREATED, places))
    if placement.market is Market.SPOT:
        state = state.changed(spot_absent_since=None)
    state = _with_counted(state, fact.vm, existed=True, id=fact.id)
    return state.with_vm(replace(state.vms[fact.vm], created_at=fact.at)) if vm.live else state


def _gone(state: JobState, fact: VmGone) -> JobState:
    vm = state.leaving.get(fact.vm)
    if vm is None:
        return state
    return _paid(state.changed(leaving=_without(state.leaving, fact.vm)), vm, fact.at, fact.ran_s)


def _not_released(state: JobState, fact: VmNotReleased) -> JobState:
    vm = state.leaving.get(fact.vm)
    if vm is None:
        return state
    return _with_counted(state, fact.vm, not_released=fact.message)


def _paid(state: JobState, vm: Vm, until: float, ran_s: float | None) -> JobState:
    """The VM costs nothing from then on; nothing at all if its cloud never had it."""
    if not vm.existed:
        ran_s = vm.unwatched_s
    if not vm.existed and not vm.unwatched_s:
        return state
    spent = bill(vm, until) if ran_s is None else bill_for(vm, ran_s)
    if not spent.at_most:
        return state
    bills = state.bills.with_vm(Bill(vm.vm, vm.number, spent))
    return state.changed(spent=state.spent + spent, bills=bills)


def _cost_noted(state: JobState, fact: CostNoted) -> JobState:
    def settled(vm: Vm) -> Vm:
        return noted(vm, fact.at, fact.unseen_s, fact.until)

    return _with_each_counted(state, settled)


def _manager_away(state: JobState, fact: ManagerAway) -> JobState:
    def unseen(vm: Vm) -> Vm:
        must_end = fact.must_end.get(vm.vm, math.inf)
        if must_end == math.inf and vm.existed:
            return vm
        by = min(must_end, math.inf if vm.must_end_by is None else vm.must_end_by)
        unwatched_s = 0.0 if vm.existed else vm.unwatched_s + fact.unwatched_s
        return replace(vm, must_end_by=None if by == math.inf else by, unwatched_s=unwatched_s)

    return _with_each_counted(state, unseen)


def _seen(state: JobState, fact: VmSeen) -> JobState:
    return _with_counted(state, fact.vm, existed=True, **({"must_end_by": None} if fact.lives else {}))


def _with_counted(state: JobState, name: str, **changes: Any) -> JobState:
    """With a VM that lives, or that has ended and may still be there, changed."""
    live, leaving = state.vms.live.get(name), state.leaving.get(name)
    if live is not None:
        return state.with_vm(replace(live, **changes))
    if leaving is None:
        return state
    return state.changed(leaving=MappingProxyType({**state.leaving, name: replace(leaving, **changes)}))


def _with_each_counted(state: JobState, change: Callable[[Vm], Vm]) -> JobState:
    leaving = {name: change(vm) for name, vm in state.leaving.items()}
    for vm in state.live_vms:
        if (changed := change(vm)) is not vm:
            state = state.with_vm(changed)
    return state.changed(leaving=MappingProxyType(leaving))


def _without(leaving: Mapping[str, Vm], vm: str) -> Mapping[str, Vm]:
    return MappingProxyType({name: known for name, known in leaving.items() if name != vm})


RULES: dict[type[Any], Callable[[JobState, Any], JobState]] = {
    AttemptMade: _attempt_made,
    AttemptRefused: _attempt_refused,
    VmCreated: _created,
    VmGone: _gone,
    VmNotReleased: _not_released,
    CostNoted: _cost_noted,
    ManagerAway: _manager_away,
    VmSeen: _seen,
}
