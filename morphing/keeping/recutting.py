"""A pipeline cut elsewhere, so that its workers lack less and no stage works longer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...pipeline import Range
from ..placement import Slot
from ..template_labels import StageCosts
from ..templates import Template, TemplateStage

_Lacking = Callable[[int, int, int], int]
"""From (stage, first section, section after the last) to the bytes that its workers lack."""
_Allowed = Callable[[int, int, Iterable[int]], Iterator[int]]
"""From (width, first section, ascending ends) to those of the ends where such a stage may end."""


def recut(
    template: Template,
    slots: Sequence[Slot],
    holding: Mapping[str, Range],
    sizes: Sequence[int],
    costs: StageCosts,
    share: int,
    *,
    slack: float,
) -> tuple[TemplateStage, ...] | None:
    """The stages with which these workers lack the fewest bytes; None if not fewer than with the template's.

    `slots`: in the order of the stages; tried as well is the order of what they hold. `sizes`: bytes of each
    section. No stage works longer than `slack` times the template's slowest, nor holds fewer of the
    pipeline's `share` micro-batches at a time than its tightest. Exact for each order, by dynamic programming
    over (stages, sections).
    """
    num, widths = len(sizes), [stage.width for stage in template.stages]
    places = [one.range.start * (num + 1) + one.range.stop for one in template.stages]
    most_ns = slack * max(costs.work_ns[at] / width for at, width in zip(places, widths, strict=True))
    window = min(share, *(costs.window[at] for at in places))

    def allowed(width: int, start: int, stops: Iterable[int]) -> Iterator[int]:
        for stop in stops:
            at = start * (num + 1) + stop
            if costs.work_ns[at] > most_ns * width:
                return  # work grows with each section
            if costs.window[at] >= window:
                yield stop

    each = [_lacking(order, widths, holding, sizes) for order in _orders(slots, widths, holding)]
    least = sum(each[0](n, one.range.start, one.range.stop) for n, one in enumerate(template.stages))
    total, cuts = min((_cut(num, widths, lacking, allowed) for lacking in each), key=lambda one: one[0])
    if total >= least:
        return None
    return tuple(
        TemplateStage(Range(start, stop), width)
        for (start, stop), width in zip(itertools.pairwise(cuts), widths, strict=True)
    )


def _orders(
    slots: Sequence[Slot], widths: Sequence[int], holding: Mapping[str, Range]
) -> list[Sequence[Slot]]:
    if max(widths) > 1 or any(slot.worker not in holding for slot in slots):
        return [slots]
    spans = {slot.worker: holding[slot.worker] for slot in slots}
    return [slots, sorted(slots, key=lambda slot: (spans[slot.worker].start, spans[slot.worker].stop))]


def _lacking(
    slots: Sequence[Slot], widths: Sequence[int], holding: Mapping[str, Range], sizes: Sequence[int]
) -> _Lacking:
    firsts = list(itertools.accumulate(widths, initial=0))
    sums = [0, *itertools.accumulate(sizes)]
    held = [holding.get(slot.worker) for slot in slots]

    def lacking(stage: int, start: int, stop: int) -> int:
        total = widths[stage] * (sums[stop] - sums[start])
        for span in held[firsts[stage] : firsts[stage + 1]]:
            if span is not None and max(span.start, start) < min(span.stop, stop):
                total -= sums[min(span.stop, stop)] - sums[max(span.start, start)]
        return total

    return lacking


def _cut(
    num: int, widths: Sequence[int], lacking: _Lacking, allowed: _Allowed
) -> tuple[float, tuple[int, ...]]:
    """The fewest bytes, infinitely many if nothing is allowed, and where the stages begin and end."""
    # By the sections that the stages so far host.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage, width in enumerate(widths):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        behind = len(widths) - 1 - stage
        for start, (before, cuts) in best.items():
            # The last stage, which need not recompute, may work less than if it ended sooner.
            stops = range(start + 1, num + 1 - behind) if behind else (num,)
            for stop in allowed(width, start, stops):
                found = before + lacking(stage, start, stop)
                if stop not in longer or found < longer[stop][0]:
                    longer[stop] = found, (*cuts, stop)
        best = longer
    return best.get(num, (math.inf, ()))
