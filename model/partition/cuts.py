"""Chooses cuts: K from counted work, and places that balance work and memory and that few bytes cross."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from ..errors import UserCodeError
from ..tracing.trace import TracedModel
from .blocks import ENOUGH_BLOCKS, marked_positions
from .flops import compute_nodes, work_per_node
from .places import MAX_PLACES, Chart, chart_of, crossing_bytes, cut_sizes, own_nodes, sums_of
from .rematerialized import find_derived

MAX_SMALL_SECTIONS = 16
"""By default K may be this large, or the most workers that the job may get, however small sections are."""
MIN_SECTION_WORK = 1e9
"""Beyond that, counted operations that a section must have on average: 20 ms on a core with 50 GFlop/s,
0.1 ms on an accelerator with 10 TFlop/s, many times what starting a section costs."""
MAX_SECTIONS = 128
_SMALLEST_SHARE = 0.25  # by default each section does at least this part of the mean work
_OWN_SECTION = 3.0  # operations before or after the blocks are a section if they do this many blocks' work
_LARGE = 0.3  # if a section does more than this part of the work, cuts are sought in all places
_PAYS = 0.75  # and taken if they reduce the largest section to this part of what it was


def choose_cuts(
    traced: TracedModel,
    num_sections: int | None = None,
    *,
    least: int = 1,
    workers: int = 1,
    marks: Sequence[str] | None = None,
    work: Sequence[float] | None = None,
) -> list[int]:
    """Choose the graph positions before which sections 1..K-1 begin.

    Deterministic; K does not depend on `work`. `marks` (`Training.cuts`) are names of modules before whose
    first operation a section begins; given, they decide. Otherwise, with `num_sections` None: a section for
    each of the model's repeated blocks, if there are at least 8 (operations before the first and after the
    last go with those, unless they are much heavier than a block), else as many sections as have a fair share
    of the work; more than 16 only while each has at least `MIN_SECTION_WORK` on average, or the job may get a
    worker for each. Cuts are where fewest bytes cross; elsewhere only if sections would else be much larger
    than necessary. `least`: the K that the job's P requires; `workers`: as many as the job may get. `work`:
    measured prices of `compute_nodes`, in any unit; None counts operations.

    Raises `ValueError` if the graph has too few places for `num_sections` or `least`, `UserCodeError` naming
    an invalid mark, or if marks are too few.
    """
    nodes = compute_nodes(traced.graph)
    derived = find_derived(traced)
    if marks is not None:
        return _marked_cuts(nodes, derived, marks, num_sections, least)
    counted = work_per_node(nodes, traced.precision)
    chart = chart_of(traced, nodes, derived, counted, _SMALLEST_SHARE / MAX_SMALL_SECTIONS)
    if num_sections is not None and not 1 <= num_sections <= chart.most:
        raise ValueError(
            f"num_sections: {num_sections} is not in 1..{chart.most}, what the model's graph allows"
        )
    if least > (num_sections or chart.most):
        raise ValueError(_too_deep(least, num_sections, chart.most))
    if num_sections is None:
        choice = _automatic(chart, _most_unasked(sum(counted), workers))
        num_sections = len(choice.cuts) + 1
        choice = choice if num_sections >= least else _into(chart, least)
    else:
        choice = _into(chart, num_sections)
    if work is None:
        return choice.cuts
    own = [0.0 if node in derived else price for node, price in zip(nodes, work, strict=True)]
    return chart.best(choice.places, len(choice.cuts) + 1, sums_of(own), by_memory=choice.by_memory)


def most_sections(traced: TracedModel) -> int:
    """The largest `num_sections` that the model's graph allows."""
    nodes = compute_nodes(traced.graph)
    return min(len(cut_sizes(nodes, find_derived(traced))), MAX_PLACES) + 1


def sections_for_workers(traced: TracedModel, workers: int) -> int:
    """The largest default K for so many workers; 0 if it is also the default for one."""
    counted = sum(work_per_node(compute_nodes(traced.graph), traced.precision))
    most = min(_most_unasked(counted, workers), most_sections(traced))
    return most if most > _most_unasked(counted, 1) else 0


def _most_unasked(counted: float, workers: int) -> int:
    """The largest default K: more than a few sections only while each has enough work, or a worker."""
    return max(MAX_SMALL_SECTIONS, min(MAX_SECTIONS, max(workers, int(counted / MIN_SECTION_WORK))))


@dataclass(frozen=True)
class _Choice:
    """Cuts by counted work, and the places that they were chosen from."""

    cuts: list[int]
    places: Sequence[int]
    by_memory: bool = False


def _automatic(chart: Chart, most: int) -> _Choice:
    if len(chart.blocks) >= ENOUGH_BLOCKS:
        places = _block_places(chart)
        return _Choice(chart.best(places, min(len(places) + 1, most)), places)
    return _finer_if_it_pays(
        chart, _fair(chart, chart.good, most), lambda: _fair(chart, chart.layers(most), most, by_memory=True)
    )


def _fair(chart: Chart, places: Sequence[int], most: int, *, by_memory: bool = False) -> _Choice:
    """As many sections as get a fair share of the work each (`by_memory`: or of the parameters)."""
    wanted = min(len(places) + 1, most)
    while wanted > 1:
        cuts = chart.best(places, wanted, by_memory=by_memory)
        shares = [max(share) if by_memory else share[0] for share in chart.shares(cuts)]
        if min(shares) >= _SMALLEST_SHARE / wanted:
            return _Choice(cuts, places, by_memory)
        wanted -= max(1, wanted // MAX_SMALL_SECTIONS)
    return _Choice([], places, by_memory)


def _into(chart: Chart, wanted: int) -> _Choice:
    """`wanted` sections, at most `chart.most`."""

    def finer() -> _Choice:
        places = chart.fine(wanted)
        return _Choice(chart.best(places, wanted, by_memory=True), places, by_memory=True)

    if len(chart.good) < wanted - 1:
        return finer()
    return _finer_if_it_pays(chart, _Choice(chart.best(chart.good, wanted), chart.good), finer)


def _finer_if_it_pays(chart: Chart, coarse: _Choice, finer: Callable[[], _Choice]) -> _Choice:
    """`finer` if the coarse choice has a section with a large part of the work, and the finer one's largest
    is much smaller in work, or, with more sections, in parameters; else `coarse`."""
    work, held = (max(parts) for parts in zip(*chart.shares(coarse.cuts), strict=True))
    if work <= _LARGE:
        return coarse
    fine = finer()
    fine_work, fine_held = (max(parts) for parts in zip(*chart.shares(fine.cuts), strict=True))
    saves_memory = len(fine.cuts) > len(coarse.cuts) and fine_held <= _PAYS * held
    return fine if fine_work <= _PAYS * work or saves_memory else coarse


def _too_deep(depth: int, num_sections: int | None, most: int) -> str:
    """The message that a job's P is impossible."""
    if num_sections is not None:
        why = f"num_sections ({num_sections}); raise it, the model's graph allows {most}"
    elif most == 1:
        why = "the 1 section that the model is: there is no place in its graph for a cut"
    else:
        why = f"the {most} sections that the model's graph allows"
    return f"pipeline_parallel_degree: {depth} is more than {why}"


def _block_places(chart: Chart) -> list[int]:
    """Where each block but the first begins; also the ends of all blocks, if operations beyond are heavy."""
    work, blocks = chart.work, chart.blocks
    first, last = blocks[0][0], blocks[-1][1]
    usual = (work[last + 1] - work[first]) / len(blocks)
    found = [start for start, _ in blocks[1:]]
    if first in chart.good and work[first] > _OWN_SECTION * usual:
        found.insert(0, first)
    behind = next((place for place in chart.good if place > last), None)
    if behind is not None and work[-1] - work[behind] > _OWN_SECTION * usual:
        found.append(behind)
    return found


def _marked_cuts(
    nodes: Sequence[fx.Node],
    derived: Collection[fx.Node],
    marks: Sequence[str],
    num_sections: int | None,
    least: int,
) -> list[int]:
    crossing = crossing_bytes(nodes, derived)
    own = own_nodes(nodes, derived)
    positions = marked_positions(own, marks)
    begins = next(iter(own), 0)
    taken: dict[int, str] = {}
    for mark, position in positions.items():
        if position <= begins:
            raise UserCodeError(f"Training.cuts: {mark!r} is where the model begins; leave it out")
        if position in taken:
            raise UserCodeError(
                f"Training.cuts: {taken[position]!r} and {mark!r} begin at the same operation"
            )
        if crossing[position] is None:
            raise UserCodeError(
                f"Training.cuts: there can be no cut before {mark!r}: an operation with several results, or "
                "a tensor that is changed in place, reaches over it; mark a module before or after it"
            )
        taken[position] = mark
    if num_sections is not None and num_sections != len(taken) + 1:
        raise UserCodeError(
            f"Training.cuts: {len(taken)} marks make {len(taken) + 1} sections, but parallelism.num_sections "
            f"is {num_sections}; leave one of them out"
        )
    if least > len(taken) + 1:
        raise UserCodeError(
            f"Training.cuts: {len(taken)} marks make {len(taken) + 1} sections, fewer than "
            f"parallelism.pipeline_parallel_degree ({least}); name more modules, or lower it"
        )
    return sorted(taken)
