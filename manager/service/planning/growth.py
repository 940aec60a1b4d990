"""Answers `ComputeGrowth`: the fewest VMs more that pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from ....morphing import Infeasible, choose
from ...core.alternatives import Alternative
from ...core.commands import ComputeGrowth, DeathRisk, WorkerSlot
from ...core.events import GrowthComputed
from ...core.state import JobState
from .requests import request_of
from .weighing import Offer, num_copies, weighed


def compute_growth(state: JobState, command: ComputeGrowth, clock: Callable[[], float]) -> GrowthComputed:
    """The fewest additional VMs that are worth what taking them in costs. Blocks.

    Raises `InvalidCalibration`.

    Where some number of VMs allows as many copies of each section as the job asks for, only plans with them
    count. More workers never make the best plan slower, because a plan may leave some out. So the number is
    found by bisection, in as many sweeps as it has binary digits, plus two.
    """
    found = cache(partial(_offer, state, command))
    copies = any(_has_copies(found(number)) for number in (0, command.most))  # else they are not to be had

    def offer(num_more: int) -> Offer | None:
        return found(num_more) if not copies or _has_copies(found(num_more)) else None

    now = offer(0)

    def grown(num_more: int) -> GrowthComputed:
        more = offer(num_more)
        alternatives = _weighed(command, now, more)
        return GrowthComputed(
            now=clock(),
            key=command.key,
            num_more=num_more,
            step_s=None if now is None else now.step_s,
            grown_s=None if more is None else more.step_s,
            pays=more is not None and alternatives[0].name == more.name,
            alternatives=alternatives,
        )

    best, too_few = grown(command.most), 0
    while best.pays and best.num_more - too_few > 1:
        middle = grown((too_few + best.num_more) // 2)
        if middle.pays:
            best = middle
        else:
            too_few = middle.num_more
    return best


def _weighed(command: ComputeGrowth, now: Offer | None, more: Offer | None) -> tuple[Alternative, ...]:
    offers = [offer for offer in (now, more) if offer is not None]
    by_worth = weighed(offers, command.ends_s, command.least_gain) if offers else []
    return tuple(one for _, one in by_worth)


def _offer(state: JobState, command: ComputeGrowth, num_more: int) -> Offer | None:
    """The best plan with so many VMs more, whose sections they load; None: there is none."""
    more = [
        slot.model_copy(update={"worker": f"{n}/{slot.worker}", "vm": f"{n}/{slot.vm}"})
        for n in range(num_more)
        for slot in command.more
    ]
    workers = (*command.workers, *more)
    request = replace(request_of(state, workers, generation=0, risk=_risk(command, workers)), holding={})
    found = choose(request)
    if isinstance(found, Infeasible):
        return None
    return Offer(
        f"{num_more} more" if num_more else "as many",
        request,
        found.plan,
        found.workers,
        found.predicted_s,
        change_s=command.change_s,
        runs=num_more == 0,
    )


def _risk(command: ComputeGrowth, workers: Sequence[WorkerSlot]) -> DeathRisk | None:
    """As it is known for the VMs that are there; of more VMs as many more are lost."""
    risk, known = command.risk, {slot.vm for slot in command.workers}
    if risk is None or not known:
        return risk
    times = len({slot.vm for slot in workers}) / len(known)
    return risk.model_copy(update={"losses_per_s": risk.losses_per_s * times})


def _has_copies(offer: Offer | None) -> bool:
    """Whether each section of a plan lives on as many VMs as the job asks for."""
    if offer is None:
        return False
    return num_copies(offer.request, offer.plan, offer.workers) > offer.request.tolerated_failures
