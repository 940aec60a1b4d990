"""Where VMs are asked for, and what an answer leads to: the first offer that is allowed, not backed off from,
and within the caps. What the provider was asked is in the journal before it is asked.

A VM's next attempt follows only when nothing of the last exists. All VMs of a job are at one site, so long as
one of them lives: a region, and a zone of it unless the job file lists several.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from types import MappingProxyType

from ...spec.placement import Attempt, Market, Offer, Placement, Price
from ...spec.resources import CLOUDS
from ..commands import RequestVm
from ..context import Context
from ..cost import price_of
from ..events import AttemptFailed, AttemptSucceeded, ConsoleRead, RequestTroubled
from ..facts import (
    AttemptMade,
    AttemptRefused,
    EndReason,
    RefusalKind,
    Resumption,
    VmCreated,
    VmEnded,
    VmRequested,
)
from ..fold.renting import origin_of, place_of, strikes_of, vm_origin
from ..offer_order import in_order, measured_speeds
from ..pools import giving_up
from ..pools.claims import FULL, is_on_site
from ..pools.shares import pool_of
from ..strikes.table import Kind
from ..vms import Vm, VmStatus
from . import growth, spending, waiting

_NOT_WANTED = "its market is not wanted now"


def take(context: Context) -> None:
    """The provider's answers."""
    event = context.event
    if isinstance(event, ConsoleRead) and context.state.active:
        _stops_asking(context, event.text)
    if isinstance(event, RequestTroubled):
        known, live = context.observations.request_errors, context.state.vms.live
        errors = {vm: error for vm, error in known.items() if vm in live} | {event.vm: event.error}
        context.note(request_errors=MappingProxyType(errors))
    if not isinstance(event, AttemptSucceeded | AttemptFailed):
        return
    vm = context.state.vms.get(event.vm)
    if vm is None or vm.attempt is None or vm.attempt.number != event.number:
        return
    if isinstance(event, AttemptSucceeded):
        if not vm.id:
            context.fact(VmCreated(at=context.now, vm=vm.vm, number=event.number, id=event.id))
    elif vm.attempted_at is not None and (vm.live or event.kind is not RefusalKind.ENDED):
        _refused(context, vm.attempt, event)


def taken_back(context: Context, vm: Vm, why: str, *, gone: bool = False, ran_s: float | None = None) -> None:
    """A VM was created, and its cloud took it before it joined: that says nothing against its image or the
    manager's address, and its place is left alone for a while."""
    if vm.attempt is not None and not context.has_joined(vm):
        number, kind = vm.attempt.number, RefusalKind.ENDED
        context.fact(AttemptRefused(at=context.now, vm=vm.vm, number=number, kind=kind, message=why))
    if vm.live:
        context.end_vm(vm.vm, EndReason.PREEMPTED, why, gone=gone, ran_s=ran_s)


def give_up_unanswered(context: Context, vm: Vm) -> None:
    """Whether its cloud has made the VM was never known: its place is left alone for a while, and nothing is
    said against its image."""
    error = context.observations.request_errors.get(vm.vm, "the answer is still to come")
    why = f"no VM was seen in {context.timing.request_timeout_s:g} s: {error}"
    if vm.attempt is not None:
        number, kind = vm.attempt.number, RefusalKind.NO_ANSWER
        context.fact(AttemptRefused(at=context.now, vm=vm.vm, number=number, kind=kind, message=why))
    context.end_vm(vm.vm, EndReason.REQUEST_FAILED, why)


def is_probably_taken(context: Context, vm: Vm) -> bool:
    """Of a VM that is gone, and whose cloud does not say why: a spot VM, where others like it have joined."""
    origin = vm_origin(vm)
    is_spot = vm.attempt is not None and vm.attempt.placement.market is Market.SPOT
    return is_spot and origin in context.state.joined_from


def request(context: Context, names: Sequence[str], most: int) -> None:
    """Ask for VMs of these names, or for as many of them as may be had and, of a cloud's, would pay.

    `most`: how many the job may have besides, whether or not they are asked for now.
    """
    if _stops_asking(context):
        return
    why, why_not_rented, num_rented = "", "", None
    for name in names:
        offer = next_offer(context)
        if not isinstance(offer, str) and offer[0].placement.provider in CLOUDS:
            if num_rented is None:
                num_rented, why_not_rented = growth.may_rent(
                    context, offer[0].placement, _to_be_had(context, *offer, most)
                )
            if num_rented > 0:
                num_rented -= 1
            else:
                free = next_offer(context, rents=False)
                offer = why_not_rented if isinstance(free, str) else free
        if isinstance(offer, str):
            why = offer
            break
        context.fact(VmRequested(at=context.now, vm=name))
        _attempt(context, name, 1, *offer)
    context.note(why_no_vm=why)
    resources = context.spec.resources
    if why == spending.SPENT and len(context.state.counted_vms) < resources.min_nodes:
        spending.order_stop(context, f"its budget of {resources.budget:g} USD pays for no more VMs")


def next_offer(context: Context, *, rents: bool = True) -> tuple[Offer, Price] | str:
    """The offer to take for one more VM, and its price; or why there is none. `rents`: also of clouds."""
    resources, faults = context.spec.resources, dict[str, None]()
    if not resources.clouds:
        placement = Placement(provider=resources.providers[0])
        free = Price(hourly=0.0, ceiling=0.0, at=context.now, source="nobody bills")
        return giving_up.why_no_more(context, placement) or (Offer(placement=placement, price=free), free)
    if context.observations.offers is None:
        return "prices are not known yet"
    for offer in _ordered(context, context.observations.offers):
        if not rents and offer.placement.provider in CLOUDS:
            continue
        price = price_of(resources, offer, context.now)
        found = _fault(context, offer, price)
        if not found and price is not None:
            return offer, price
        faults[found] = None
    if context.observations.unanswered:  # what they offer may do: nothing final is concluded from the others
        return f"prices of {' and '.join(context.observations.unanswered)} are not known yet"
    if spending.SPENT in faults and faults.keys() <= {spending.SPENT, _NOT_WANTED}:
        return spending.SPENT
    faults.pop(_NOT_WANTED, None)
    return next(iter(faults), "there is no offer")


def _ordered(context: Context, offers: Sequence[Offer]) -> list[Offer]:
    measured = measured_speeds(context.state, context.observations)
    return in_order(context.spec.resources, offers, context.now, measured)


def _to_be_had(context: Context, offer: Offer, price: Price, most: int) -> int:
    """How many of `most` VMs the caps allow, if each costs as much as this one."""
    resources = context.spec.resources
    if offer.placement.market is Market.ON_DEMAND and resources.spot:
        most = min(most, resources.on_demand_nodes - _num_on_demand(context))

    def is_too_much(num_vms: int) -> bool:
        return bool(spending.fault(context, num_vms * price.ceiling))

    return 1 + bisect_left(range(2, most + 1), True, key=is_too_much)  # what was offered can be had


def _attempt(context: Context, vm: str, number: int, offer: Offer, price: Price) -> None:
    resources = context.spec.resources
    bid = resources.max_price if offer.placement.market is Market.SPOT else None
    if bid is not None and offer.on_demand is not None:
        bid = min(bid, offer.on_demand)
    attempt = Attempt(
        vm=vm,
        number=number,
        placement=offer.placement,
        max_price=bid,
        image=resources.image_of(offer.placement.provider) or "",
        disk_gb=resources.disk_gb,
        num_gpus=offer.num_gpus,
        ends_itself=offer.ends_itself,
    )
    url = context.observations.manager_url
    context.fact(AttemptMade(at=context.now, vm=vm, attempt=attempt, price=price, manager_url=url))
    key = f"{vm}/request" if number == 1 else f"{vm}/request/{number}"
    context.command(RequestVm(key=key, vm=vm, attempt=attempt))


def _refused(context: Context, attempt: Attempt, event: AttemptFailed) -> None:
    """Ask elsewhere, or give the VM up: what is asked for later is another one."""
    number, kind = attempt.number, event.kind
    state = context.state
    if kind is RefusalKind.ENDED:
        taken_back(context, state.vms[attempt.vm], event.error)
        return
    is_cloud = bool(context.spec.resources.clouds)
    if is_cloud:
        refused = AttemptRefused(at=context.now, vm=attempt.vm, number=number, kind=kind, message=event.error)
        context.fact(refused)
    if attempt.vm not in state.vms.live:
        return
    offer = next_offer(context) if is_cloud and state.active else ""
    if isinstance(offer, str):
        if is_cloud:
            fact = VmEnded(at=context.now, vm=attempt.vm, reason=EndReason.REQUEST_FAILED, detail=event.error)
            context.fact(fact)
        else:
            context.end_vm(attempt.vm, EndReason.REQUEST_FAILED, event.error)
    else:
        _attempt(context, attempt.vm, number + 1, *offer)


# ---- what is wrong with an offer ---------------------------------------------------------------------------


def _fault(context: Context, offer: Offer, price: Price | None) -> str:
    """Why the offer cannot be taken now; empty if it can."""
    resources, placement = context.spec.resources, offer.placement
    if placement.provider not in resources.providers:
        return f"{placement.provider} is not in resources.provider"
    others = giving_up.why_no_more(context, placement)
    if others:
        return others
    if placement.provider in CLOUDS and context.is_paused(Kind.SHORT):
        return f"{context.strikes(Kind.SHORT).count} times fewer VMs than min_nodes came, and waited in vain"
    untried = _never_join(context, placement) or _on_trial(context, placement)
    if untried:
        return untried
    if not is_on_site(context.state, placement):
        return "no other place is asked while VMs of the job live in one"
    if placement.market is Market.ON_DEMAND and not _on_demand_allowed(context, placement):
        return _NOT_WANTED
    if placement.market is Market.SPOT and not resources.spot:
        return _NOT_WANTED
    refused = _backed_off(context, placement)
    if refused:
        return refused
    if price is None:
        what = f"{placement.instance_type} of {placement.provider}"
        return f"no price is known for {what}: resources.hourly_price says one"
    return spending.fault(context, price.ceiling)


def _on_demand_allowed(context: Context, placement: Placement) -> bool:
    resources = context.spec.resources
    if not resources.spot or placement.provider not in resources.clouds:
        return True
    absent_since = context.state.spot_absent_since
    if not resources.on_demand_nodes or absent_since is None:
        return False
    if context.elapsed_s(absent_since) < resources.on_demand_after_s:
        return False
    return _num_on_demand(context) < resources.on_demand_nodes


def _num_on_demand(context: Context) -> int:
    attempts = [vm.attempt for vm in context.state.counted_vms if vm.attempted_at is not None]
    return sum(it is not None and it.placement.market is Market.ON_DEMAND for it in attempts)


def _backed_off(context: Context, placement: Placement) -> str:
    """Why this place is left alone for now; empty if it is not."""
    may_have_room = pool_of(placement) in context.observations.share.freed
    for refusal in RefusalKind:
        kind, place = strikes_of(refusal), place_of(placement, refusal)
        if context.is_paused(kind, place) and not (may_have_room and refusal in FULL):
            return context.strikes(kind, place).why
    place = place_of(placement, RefusalKind.ENDED)
    return context.strikes(Kind.TAKEN_VM, place).why if context.is_paused(Kind.TAKEN_VM, place) else ""


# ---- asking stops ------------------------------------------------------------------------------------------


def _origin(context: Context, provider: str) -> str:
    """Of a VM that would be asked for there now."""
    image = context.spec.resources.image_of(provider) or ""
    return origin_of(provider, image, context.observations.manager_url)


def _on_trial(context: Context, placement: Placement) -> str:
    """Why no other VM of a cloud is asked for beside one that is on its way; empty if one may be.

    The first is tried alone until it joins, and so are those after one that did not.
    """
    provider, state = placement.provider, context.state
    origin = _origin(context, provider)
    missing = context.strikes(Kind.NOT_JOINED, origin).count
    if provider not in CLOUDS or (origin in state.joined_from and not missing):
        return ""
    for vm in state.live_vms:
        if vm.status is VmStatus.REQUESTED and vm.attempt is not None and vm.attempted_at is not None:
            place, image = vm.attempt.placement.provider, vm.attempt.image
            if origin_of(place, image, vm.manager_url) == origin:
                which = "next VM" if missing else "first VM"
                return f"the {which} from {provider} is tried alone until it joins"
    return ""


def _never_join(context: Context, placement: Placement) -> str:
    """Why no more VMs are asked for there; empty if the last of them joined, or too few did not."""
    origin = _origin(context, placement.provider)
    if not context.is_reached(Kind.NOT_JOINED, origin):
        return ""
    return f"{context.strikes(Kind.NOT_JOINED, origin).count} VMs in a row were rented and did not join"


def _stops_asking(context: Context, console: str | None = None) -> bool:
    """Whether a person is asked instead: all that could be had is not allowed, or never joins.

    `console`: of the last VM that did not join, once it was read; that is waited for for a while.
    """
    state, resources = context.state, context.spec.resources
    if not resources.clouds or context.observations.unanswered or _trains(context):
        return False
    spot_alone = resources.spot and not resources.on_demand_nodes
    offers = [offer.placement for offer in context.observations.offers or ()]
    wanted = [place for place in offers if place.market is Market.SPOT or not spot_alone]
    never = [_never_join(context, place) for place in wanted]
    refused = [
        context.strikes(Kind.LIMITED, place_of(place, RefusalKind.NOT_ALLOWED)).why for place in wanted
    ]
    reasons = [refusal or why for refusal, why in zip(refused, never, strict=True)]
    if not reasons or not all(reasons):
        return False
    if all(refused):
        console = ""
    last_at = max((it.since for it in state.strikes.all(Kind.NOT_JOINED).values()), default=0.0)
    if console is None and context.elapsed_s(last_at) <= context.timing.console_s:
        return True
    waiting.wait(context, " ".join(dict.fromkeys(reasons)), (Resumption.AGAIN,), console=console or "")
    return True


def _trains(context: Context) -> bool:
    """Whether VMs that live may train, or may come to."""
    state = context.state
    if state.current is not None or any(vm.status is VmStatus.REQUESTED for vm in state.live_vms):
        return True
    staying = [vm for vm in state.live_vms if vm.status is not VmStatus.NOTICED]
    return bool(state.live_vms) and len(staying) >= context.spec.resources.min_nodes
