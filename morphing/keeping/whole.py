"""Which pipelines the workers of a request hold whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from ...pipeline import Range
from ..request import Request
from ..templates import TemplateStage
from .instead import Before

Stages = tuple[TemplateStage, ...]


def whole_pipelines(request: Request, before: Before) -> list[Stages]:
    """The stages of each: of pipelines of the plan that ran, then of others that survivors happen to make up.

    A VM is a link of a pipeline if its workers' ranges, in order, follow each other; workers of one range
    are one stage.
    """
    vms: dict[str, list[Range | None]] = {}
    for slot in request.workers:
        vms.setdefault(slot.vm, []).append(request.holding.get(slot.worker))
    links = {vm: link for vm, held in vms.items() if (link := _link(held))}
    vm_of = {slot.worker: slot.vm for slot in request.workers}
    whole = list[Stages]()
    for path in before.plan.paths:
        chain = [*dict.fromkeys(vm_of.get(before.workers[hop.worker], "") for hop in path.hops)]
        if all(vm in links for vm in chain):
            stages = tuple(stage for vm in chain for stage in links[vm])
            if _is_pipeline(stages, request.num_sections):
                whole.append(stages)
                for vm in chain:
                    del links[vm]
    by_start: dict[int, list[Stages]] = {}
    for link in links.values():
        by_start.setdefault(link[0].range.start, []).append(link)
    while found := _chain(by_start, request.num_sections):
        for link in found:
            by_start[link[0].range.start].remove(link)
        whole.append(tuple(stage for link in found for stage in link))
    return whole


def _link(held: Sequence[Range | None]) -> Stages:
    """What the workers of a VM hold, as consecutive stages; none if it is not that."""
    spans = [span for span in held if span is not None]
    if len(spans) < len(held):
        return ()
    widths = Counter(sorted(spans, key=lambda span: (span.start, span.stop)))
    stages = tuple(TemplateStage(span, width) for span, width in widths.items())
    return stages if _follow_each_other(stages) else ()


def _is_pipeline(stages: Stages, num_sections: int) -> bool:
    reaches = stages[0].range.start == 0 and stages[-1].range.stop == num_sections
    return reaches and _follow_each_other(stages)


def _follow_each_other(stages: Stages) -> bool:
    return all(one.range.stop == two.range.start for one, two in itertools.pairwise(stages))


def _chain(by_start: Mapping[int, Sequence[Stages]], num_sections: int) -> list[Stages]:
    """Links from the first section to the last; none if there are no such."""
    last: dict[int, Stages] = {}  # by the section after it, of links that go on from the first section
    for start in sorted(by_start):
        if start == 0 or start in last:
            for link in by_start[start]:
                last.setdefault(link[-1].range.stop, link)
    found, stop = list[Stages](), num_sections
    while stop in last:
        found.append(last[stop])
        stop = found[-1][0].range.start
    return found[::-1]
