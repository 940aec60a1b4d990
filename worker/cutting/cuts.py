"""Where to cut: the places of a graph that little crosses, and the choice among them that balances the
work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ..errors import UserCodeError
from ..tracing.functional import written_spans
from ..tracing.trace import TracedModel
from .balanced import best_cuts
from .blocks import ENOUGH_BLOCKS, Blocks, find_blocks, marked_positions
from .derived import find_derived
from .work import compute_nodes, work_per_node

MAX_SMALL_SECTIONS = 16
"""By default a model is cut into up to so many sections however small they are; few workers need more."""
MIN_SECTION_WORK = 1e9
"""Counted operations below which a section more does not pay: 20 ms on a core that does 50 GFlop/s, 0.1 ms on
an accelerator that does 10 TFlop/s, many times what starting a section costs."""
MAX_SECTIONS = 128
_SMALLEST_SHARE = 0.25  # by default no section does less than this part of the mean work
_OWN_SECTION = 3.0  # what surrounds the blocks is a section of its own if it is so many blocks' work
_MAX_PLACES = 256
_NEARBY = 1 / 16  # part of the whole work: moving a cut by this much still balances
_MUCH_WORSE = 1.5


def choose_cuts(
    traced: TracedModel,
    num_sections: int | None = None,
    *,
    marks: Sequence[str] | None = None,
    work: Sequence[float] | None = None,
) -> list[int]:
    """The graph positions before which sections 1..K-1 begin. Deterministic.

    `marks` (`Training.cuts`): names of modules before whose first operation a section begins; they decide.
    Otherwise, with `num_sections` None: a section for each of the model's repeated blocks, if it has at least
    8 (what comes before the first goes with it, what comes after the last with that, unless it is much
    heavier than a block), else as many sections as have a fair share of the work. More than 16 only while
    each has at least `MIN_SECTION_WORK` on average.
    `work`: measured prices of `compute_nodes`, in any unit; None counts operations.
    Raises `ValueError` when the graph has too few places for `num_sections`, `UserCodeError` naming a mark
    that cannot be.
    """
    nodes = compute_nodes(traced.graph)
    derived = find_derived(traced)
    crossing = crossing_bytes(nodes, derived)
    if marks is not None:
        return _marked_cuts(nodes, derived, crossing, marks, num_sections)
    counted = work_per_node(nodes, traced.precision)
    chart = _chart(nodes, derived, crossing, counted if work is None else work)
    if num_sections is not None:
        if not 1 <= num_sections <= len(chart.places) + 1:
            most = len(chart.places) + 1
            raise ValueError(
                f"num_sections: {num_sections} is not in 1..{most}, what the model's graph allows"
            )
        return chart.best(chart.places, num_sections)
    most = max(MAX_SMALL_SECTIONS, min(MAX_SECTIONS, int(sum(counted) / MIN_SECTION_WORK)))
    if len(chart.blocks.spans) >= ENOUGH_BLOCKS:
        places = _block_places(chart)
        return chart.best(places, min(len(places) + 1, most))
    wanted = min(len(chart.places) + 1, most)
    while wanted > 1:
        cuts = chart.best(chart.places, wanted)
        shares = [chart.work[stop] - chart.work[start] for start, stop in spans(cuts, len(nodes))]
        if min(shares) >= _SMALLEST_SHARE * chart.work[-1] / wanted:
            return cuts
        wanted -= max(1, wanted // MAX_SMALL_SECTIONS)
    return []


def spans(cuts: Sequence[int], length: int) -> list[tuple[int, int]]:
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def crossing_bytes(nodes: Sequence[fx.Node], derived: Collection[fx.Node]) -> list[int | None]:
    """Bytes that cross before each position; None where no cut may be (a tuple crosses, or a write spans it).
    What is derived does not cross."""
    number = {node: position for position, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    barred = [0] * (len(nodes) + 2)  # how many bars begin here, less those that end
    for position, node in enumerate(nodes):
        last = max((number.get(user, len(nodes)) for user in node.users), default=position)
        value = node.meta.get("val")
        if node in derived or last == position:
            continue
        if isinstance(value, Tensor):
            change[position + 1] += value.numel() * value.element_size()
            change[last + 1] -= value.numel() * value.element_size()
        elif node.op != "get_attr":
            barred[position + 1] += 1
            barred[last + 1] -= 1
    for first, final in written_spans(list(nodes)):
        barred[first + 1] += 1
        barred[final + 1] -= 1
    sizes: list[int | None] = []
    total = bars = 0
    for position in range(len(nodes)):
        total += change[position]
        bars += barred[position]
        sizes.append(None if bars else total)
    return sizes


@dataclass(frozen=True)
class _Chart:
    """What the choice is made from."""

    places: list[int]  # where cuts may be, ascending
    sizes: dict[int, int]  # bytes that cross there
    work: list[float]  # of all before each position; one entry more than there are positions
    blocks: Blocks

    def best(self, places: Sequence[int], wanted: int) -> list[int]:
        inside = {place for place in places if self._is_inside(place)}
        return best_cuts(places, self.sizes, self.work, wanted, inside)

    def _is_inside(self, place: int) -> bool:
        return any(first < place <= last for first, last in self.blocks.spans)


def _chart(
    nodes: Sequence[fx.Node],
    derived: Collection[fx.Node],
    crossing: Sequence[int | None],
    work: Sequence[float],
) -> _Chart:
    own = [0.0 if node in derived else cost for node, cost in zip(nodes, work, strict=True)]
    sums = [0.0]
    for cost in own:
        sums.append(sums[-1] + cost)
    positions = [position for position, node in enumerate(nodes) if node not in derived]
    stretches = _stretches(crossing, positions[1:])
    # In a stretch a cut is best before a block, else before what is heavy: a layer with what follows it.
    sizes = {
        place: size for stretch in stretches for place in stretch if (size := crossing[place]) is not None
    }
    blocks = find_blocks(nodes, own, derived, sizes)
    starts = set(blocks.starts)
    heavy = _SMALLEST_SHARE * sums[-1] / MAX_SMALL_SECTIONS
    places: list[int] = []
    for stretch in stretches:
        begins = [place for place in stretch if place in starts]
        begins = begins or [place for place in stretch if own[place] > heavy]
        places += begins or stretch[:1]
    return _Chart(_thin(places, sizes, sums), sizes, sums, blocks)


def _stretches(crossing: Sequence[int | None], positions: Sequence[int]) -> list[list[int]]:
    """Where, among `positions`, the crossing bytes are a local minimum: positions of each flat stretch."""
    flat: list[list[int]] = []
    for position in positions:
        size = crossing[position]
        if size is None:
            continue
        if flat and crossing[flat[-1][0]] == size:
            flat[-1].append(position)
        else:
            flat.append([position])
    heights = [crossing[stretch[0]] or 0 for stretch in flat]
    return [
        stretch
        for number, stretch in enumerate(flat)
        if (number == 0 or heights[number - 1] > heights[number])
        and (number + 1 == len(flat) or heights[number + 1] > heights[number])
    ]


def _thin(places: list[int], sizes: dict[int, int], work: list[float]) -> list[int]:
    """Those without a better place beside them or a much better one near by; at most `_MAX_PLACES` that least
    crosses, in order."""
    near = _NEARBY * work[-1]

    def beaten(number: int, place: int) -> bool:
        close = [other for other in places if abs(work[other] - work[place]) <= near]
        beside = [other for other in places[max(0, number - 1) : number + 2] if other in close]
        return sizes[place] > min(
            min(sizes[other] for other in beside), _MUCH_WORSE * min(sizes[other] for other in close)
        )

    good = [place for number, place in enumerate(places) if not beaten(number, place)]
    return sorted(sorted(good, key=lambda place: (sizes[place], place))[:_MAX_PLACES])


def _block_places(chart: _Chart) -> list[int]:
    """Where each block but the first begins; also the two ends of all blocks, if what is beyond is heavy."""
    work, blocks = chart.work, chart.blocks.spans
    first, last = blocks[0][0], blocks[-1][1]
    usual = (work[last + 1] - work[first]) / len(blocks)
    found = list(chart.blocks.starts[1:])
    if first in chart.places and work[first] > _OWN_SECTION * usual:
        found.insert(0, first)
    behind = next((place for place in chart.places if place > last), None)
    if behind is not None and work[-1] - work[behind] > _OWN_SECTION * usual:
        found.append(behind)
    return found


def _marked_cuts(
    nodes: Sequence[fx.Node],
    derived: Collection[fx.Node],
    crossing: Sequence[int | None],
    marks: Sequence[str],
    num_sections: int | None,
) -> list[int]:
    positions = marked_positions(nodes, derived, marks)
    begins = next((position for position, node in enumerate(nodes) if node not in derived), 0)
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
    return sorted(taken)
