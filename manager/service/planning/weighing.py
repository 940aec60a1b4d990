"""What plans are worth on a job's workers, as the facts tell it (see `morphing.worths`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....morphing import Choice, Prospect, Request, copies_of, prospect_of, worths
from ....pipeline import Plan
from ...core.alternatives import Alternative

_PASSED_OVER = 5  # of the plans that others were preferred to, those told


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan for a request, its workers in rank order, and the predicted seconds of a step.

    `change_s`: for how long nothing steps until it does, at least; `runs`: it steps already.
    """

    name: str
    request: Request
    plan: Plan
    workers: Sequence[str]
    step_s: float
    change_s: float = 0.0
    runs: bool = False


def weighed(
    offers: Sequence[Offer], ends_s: float | None, least_gain: float = 0.0
) -> list[tuple[Offer, Alternative]]:
    """The offers with what they are worth, the most first; of equals, the one offered first.

    `ends_s`: when a plan ends though nothing is lost; None: no such end is foreseen.
    The first offer is put before all that are not worth more by `least_gain`, a part of what they do.
    """
    prospects = [_prospect(offer) for offer in offers]
    values = worths(prospects, math.inf if ends_s is None else ends_s)
    found = [
        Alternative(
            name=offer.name,
            shape=offer.plan.shape,
            step_s=offer.step_s,
            begins_s=one.begins_s,
            changes_per_s=one.changes_per_s,
            change_s=one.change_s,
            worth=value,
        )
        for offer, one, value in zip(offers, prospects, values, strict=True)
    ]
    counted = [value - least_gain * one.samples_per_s for one, value in zip(prospects, values, strict=True)]
    counted[0] = values[0]
    order = sorted(range(len(found)), key=lambda place: -counted[place])
    return [(offers[place], found[place]) for place in order]


def passed_over(choice: Choice) -> tuple[Alternative, ...]:
    """Of the sweep's rows other than the choice's, the fastest of each shape, and why it was not taken."""
    rows = [row for row in choice.candidates if row.shape != choice.candidate.shape]
    rows.sort(key=lambda row: (row.rejected is not None, row.predicted_s or 0.0))
    first = {row.shape: row for row in reversed(rows)}
    return tuple(
        Alternative(
            name="new",
            shape=row.shape,
            step_s=row.predicted_s,
            rejected=row.rejected or "its steps take longer, with what deaths cost",
        )
        for row in rows
        if first[row.shape] is row
    )[:_PASSED_OVER]


def num_copies(request: Request, plan: Plan, workers: Sequence[str]) -> int:
    """On how many VMs each section of the plan lives, at least; `workers`: in rank order."""
    vm_of = {slot.worker: slot.vm for slot in request.workers}
    return copies_of(plan, [vm_of[worker] for worker in workers])


def _prospect(offer: Offer) -> Prospect:
    slot_of = {slot.worker: slot for slot in offer.request.workers}
    slots = [slot_of[worker] for worker in offer.workers]
    change_s = None if offer.runs else offer.change_s
    return prospect_of(offer.request, offer.plan.ranges, slots, offer.step_s, change_s)
