"""The rest of a step that was cut off: what is missing, dealt to the paths of a plan.

Members compute it alike from what all have shown, so it is not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import or_

from .contributions import Pairs, micro_batches_of
from .plan import Path, Plan, RestOfStep

Open = tuple[int, frozenset[int]]
"""`Path.open_from` and `Path.held`."""


def rest_of_step(
    plan: Plan,
    missing: Mapping[tuple[int, ...], Pairs],
    unknown_losses: Collection[int],
    work: Sequence[int],
) -> RestOfStep:
    """Deal what is missing of each bucket, by its sections, to the paths of `plan`.

    `unknown_losses`: micro-batches whose piece of the loss nobody has. `work`: of each section, that of a
    forward in any unit; an I is taken for as much, and so is a W. Micro-batches with the most left to do are
    dealt first, each to the path that is then done first, in proportion to the number of micro-batches that
    the plan gives to each.
    """
    alike = list(_open_sections(plan, missing, unknown_losses).items())
    left = [
        (cost, micro_batch, group)
        for group, (opening, bits) in enumerate(alike)
        for cost in [_cost(opening, work)]
        for micro_batch in micro_batches_of(bits)
    ]
    shares = [len(path.micro_batches) for path in plan.paths]
    loads = [0] * len(shares)
    dealt: list[dict[int, list[int]]] = [{} for _ in shares]
    places = [place for place, share in enumerate(shares) if share]
    for cost, micro_batch, group in sorted(left, key=lambda each: (-each[0], each[1])):
        place = places[0]
        for other in places[1:]:
            if (loads[other] + cost) * shares[place] < (loads[place] + cost) * shares[other]:
                place = other
        loads[place] += cost
        dealt[place].setdefault(group, []).append(micro_batch)
    paths = tuple(
        Path(path.hops, tuple(sorted(micro_batches)), *alike[group][0], path.window)
        for path, groups in zip(plan.paths, dealt, strict=True)
        for group, micro_batches in sorted(groups.items(), key=lambda one: min(one[1]))
    )
    return RestOfStep.of(plan, paths)


def _open_sections(
    plan: Plan, missing: Mapping[tuple[int, ...], Pairs], unknown_losses: Collection[int]
) -> dict[Open, int]:
    """{where micro-batches are open: which of those that have to run, as bits}."""
    bits = [0] * plan.num_sections
    for pairs in missing.values():
        for section, missed in zip(pairs.sections, pairs.micro_batches, strict=True):
            bits[section] |= missed
    every = reduce(or_, bits, sum(1 << micro_batch for micro_batch in unknown_losses))
    lacking: dict[tuple[int, ...], int] = {(): every}
    for section, missed in enumerate(bits):
        split = {(*sections, section): alike & missed for sections, alike in lacking.items()}
        split |= {sections: alike & ~missed for sections, alike in lacking.items()}
        lacking = {sections: alike for sections, alike in split.items() if alike}
    return {_opening(sections, plan.num_sections): alike for sections, alike in lacking.items()}


def _opening(sections: Sequence[int], num_sections: int) -> Open:
    """Of micro-batches that lack these sections, ascending."""
    lowest = sections[0] if sections else num_sections
    return lowest, frozenset(range(lowest, num_sections)).difference(sections)


def _cost(one: Open, work: Sequence[int]) -> int:
    """F everywhere, I above the lowest open section, and W where it is open."""
    open_from, held = one
    return sum(
        each * (1 + (section > open_from) + (section >= open_from and section not in held))
        for section, each in enumerate(work)
    )
