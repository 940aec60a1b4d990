"""The rest of a step that was cut off: what is missing, dealt to the paths of a plan.

Members compute it alike from what all have shown, so it is not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
    left = _open_sections(plan, missing, unknown_losses)
    cost = {micro_batch: _cost(one, work) for micro_batch, one in left.items()}
    shares = [len(path.micro_batches) for path in plan.paths]
    loads = [0] * len(shares)
    dealt: list[dict[Open, list[int]]] = [{} for _ in shares]
    places = [place for place, share in enumerate(shares) if share]
    for micro_batch in sorted(left, key=lambda one: (-cost[one], one)):
        place = places[0]
        for other in places[1:]:
            if (loads[other] + cost[micro_batch]) * shares[place] < (
                loads[place] + cost[micro_batch]
            ) * shares[other]:
                place = other
        loads[place] += cost[micro_batch]
        dealt[place].setdefault(left[micro_batch], []).append(micro_batch)
    paths = tuple(
        Path(path.hops, tuple(sorted(micro_batches)), open_from, held)
        for path, groups in zip(plan.paths, dealt, strict=True)
        for (open_from, held), micro_batches in sorted(groups.items(), key=lambda one: min(one[1]))
    )
    return RestOfStep(
        num_sections=plan.num_sections,
        num_micro_batches=plan.num_micro_batches,
        ranges=plan.ranges,
        paths=paths,
        schedule=plan.schedule,
        window=plan.window,
        recompute=plan.recompute,
        generation=plan.generation,
        optimizer_on_host=plan.optimizer_on_host,
        frozen=plan.frozen,
        halves=plan.halves,
    )


def _open_sections(
    plan: Plan, missing: Mapping[tuple[int, ...], Pairs], unknown_losses: Collection[int]
) -> dict[int, Open]:
    """For each micro-batch that has to run: where it is open."""
    bits = [0] * plan.num_sections
    for pairs in missing.values():
        for section, missed in zip(pairs.sections, pairs.micro_batches, strict=True):
            bits[section] |= missed
    lacking: dict[int, list[int]] = {micro_batch: [] for micro_batch in unknown_losses}
    for section, missed in enumerate(bits):
        for micro_batch in micro_batches_of(missed):
            lacking.setdefault(micro_batch, []).append(section)
    every = frozenset(range(plan.num_sections))
    return {
        micro_batch: (
            min(sections, default=plan.num_sections),
            every.difference(sections, range(min(sections, default=plan.num_sections))),
        )
        for micro_batch, sections in lacking.items()
    }


def _cost(one: Open, work: Sequence[int]) -> int:
    """F everywhere, I above the lowest open section, and W where it is open."""
    open_from, held = one
    return sum(
        each * (1 + (section > open_from) + (section >= open_from and section not in held))
        for section, each in enumerate(work)
    )
