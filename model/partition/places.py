"""Where a graph may be cut, with cumulative work and parameters, and the bytes that cross at each place."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from ..tracing.functional import written_spans
from ..tracing.layouts import strided_spans
from ..tracing.nodes import value_of
from ..tracing.trace import TracedModel
from .balanced import best_cuts
from .blocks import Span, find_blocks

MAX_PLACES = 256
_NEARBY = 1 / 16  # part of the whole work by which a cut may move and still balance
_MUCH_WORSE = 1.5
_GRAIN = 1 / 4  # of a section's fair share: places closer together than this count as one, for high K


def spans(cuts: Sequence[int], length: int) -> list[tuple[int, int]]:
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def crossing_bytes(nodes: Sequence[fx.Node], derived: Collection[fx.Node]) -> list[int | None]:
    """Bytes that cross before each position, derived values apart; None where no cut may be (a tuple crosses,
    or it is between the making of memory and its last write, or reading by `as_strided`)."""
    number = {node: position for position, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    barred = [0] * (len(nodes) + 2)  # how many bars begin here, less those that end
    for position, node in enumerate(nodes):
        last = max((number.get(user, len(nodes)) for user in node.users), default=position)
        value = value_of(node)
        if node in derived or last == position:
            continue
        if isinstance(value, Tensor):
            change[position + 1] += value.nbytes
            change[last + 1] -= value.nbytes
        elif node.op != "get_attr":
            barred[position + 1] += 1
            barred[last + 1] -= 1
    read = [span for span in strided_spans(nodes) if nodes[span[0]] not in derived]
    for first, final in [*written_spans(nodes), *read]:
        barred[first + 1] += 1
        barred[final + 1] -= 1
    sizes: list[int | None] = []
    total = bars = 0
    for position in range(len(nodes)):
        total += change[position]
        bars += barred[position]
        sizes.append(None if bars else total)
    return sizes


def own_nodes(nodes: Sequence[fx.Node], derived: Collection[fx.Node]) -> dict[int, fx.Node]:
    """The operations that are not derived, by position."""
    return {position: node for position, node in enumerate(nodes) if node not in derived}


def cut_sizes(nodes: Sequence[fx.Node], derived: Collection[fx.Node]) -> dict[int, int]:
    """Bytes that cross, for each position where a cut may be."""
    crossing = crossing_bytes(nodes, derived)
    begins = list(own_nodes(nodes, derived))[1:]
    return {position: size for position in begins if (size := crossing[position]) is not None}


@dataclass(frozen=True)
class Chart:
    """The data from which cuts are chosen. Cumulative lists hold the sum before each position, the total
    last."""

    sizes: dict[int, int]  # bytes that cross, for each position where a cut may be
    good: list[int]  # the positions that few bytes cross, ascending
    own: list[float]  # counted work of each position
    work: list[float]  # cumulative `own`
    held: list[float]  # cumulative bytes of parameters, each counted where it is used first
    blocks: tuple[Span, ...]

    @cached_property
    def most(self) -> int:
        """The largest K."""
        return min(len(self.sizes), MAX_PLACES) + 1

    def fine(self, wanted: int) -> list[int]:
        """Places for `wanted` sections: `layers`; if those are too few, any with some load between them; else
        all, up to `MAX_PLACES` with the fewest crossing bytes."""
        layers, anywhere = self.layers(wanted), self._least(self._apart(self.sizes, wanted))
        enough = [places for places in (layers, anywhere) if len(places) >= wanted - 1]
        return enough[0] if enough else self._least(self.sizes)

    def layers(self, wanted: int) -> list[int]:
        """The good places, and those before operations that are the first to use parameters, with some load
        between them, for about `wanted` sections."""
        first_uses = [place for place in self.sizes if self.held[place + 1] > self.held[place]]
        return self._least(self._apart(first_uses, wanted))

    def _apart(self, places: Iterable[int], wanted: int) -> set[int]:
        """The good places, and the best of each run of `places` with little load between them."""
        grain, base = _GRAIN / wanted, 0.0
        stretches: list[list[int]] = []
        for place in sorted(places):
            load = self._share(place)
            if stretches and load - base < grain:
                stretches[-1].append(place)
            else:
                stretches.append([place])
                base = load
        return {*self.good, *(min(stretch, key=self._cost) for stretch in stretches)}

    def best(
        self,
        places: Sequence[int],
        wanted: int,
        work: Sequence[float] | None = None,
        *,
        by_memory: bool = False,
    ) -> list[int]:
        """Choose `wanted`-1 of `places` by cumulative `work` (None: as counted); `by_memory`: and by
        parameters."""
        inside = {place for place in places if self._is_inside(place)}
        held = self.held if by_memory else None
        return best_cuts(places, self.sizes, self.work if work is None else work, wanted, inside, held)

    def shares(self, cuts: Sequence[int]) -> list[tuple[float, float]]:
        """For each section, (its part of all work, its part of all parameters)."""
        return [
            (
                (self.work[stop] - self.work[start]) / (self.work[-1] or 1.0),
                (self.held[stop] - self.held[start]) / (self.held[-1] or 1.0),
            )
            for start, stop in spans(cuts, len(self.own))
        ]

    def _share(self, place: int) -> float:
        """The mean of the parts of work and of parameters before a place."""
        return (self.work[place] / (self.work[-1] or 1.0) + self.held[place] / (self.held[-1] or 1.0)) / 2

    def _cost(self, place: int) -> tuple[int, bool, float, int]:
        """A sort key: best are few crossing bytes, then the begin of a block, then of a heavy operation."""
        heavy = self._share(place + 1) - self._share(place)
        return self.sizes[place], place not in {start for start, _ in self.blocks}, -heavy, place

    def _least(self, places: Iterable[int]) -> list[int]:
        return sorted(sorted(places, key=lambda place: (self.sizes[place], place))[:MAX_PLACES])

    def _is_inside(self, place: int) -> bool:
        return any(first < place <= last for first, last in self.blocks)


def chart_of(
    traced: TracedModel,
    nodes: Sequence[fx.Node],
    derived: Collection[fx.Node],
    work: Sequence[float],
    heavy_share: float,
) -> Chart:
    """Make the chart of a graph. `work`: counted work of each of `nodes`; `heavy_share`: the part of all work
    from which an operation counts as heavy, so that a section preferably begins with it."""
    own = [0.0 if node in derived else cost for node, cost in zip(nodes, work, strict=True)]
    sums = sums_of(own)
    sizes = cut_sizes(nodes, derived)
    stretches = _stretches(sizes)
    # In a flat stretch a cut is best before a block, else before a heavy operation: a layer begins with it.
    in_stretches = {place for stretch in stretches for place in stretch}
    blocks = find_blocks(own_nodes(nodes, derived), own, in_stretches)
    starts = {start for start, _ in blocks}
    heavy = heavy_share * sums[-1]
    places: list[int] = []
    for stretch in stretches:
        begins = [place for place in stretch if place in starts]
        begins = begins or [place for place in stretch if own[place] > heavy]
        places += begins or stretch[:1]
    held = sums_of(_parameter_bytes(traced, nodes, derived))
    return Chart(sizes, _thin(places, sizes, sums), own, sums, held, blocks)


def sums_of(values: Iterable[float]) -> list[float]:
    """Cumulative sums: before each of `values`, and the total last."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _parameter_bytes(
    traced: TracedModel, nodes: Sequence[fx.Node], derived: Collection[fx.Node]
) -> list[float]:
    """Bytes of the parameters that each position is the first to use, directly or through derived values."""
    names: dict[fx.Node, frozenset[str]] = {
        place: frozenset({traced.parameters[place.name]})
        for place in traced.graph.find_nodes(op="placeholder")
        if place.name in traced.parameters
    }
    seen: set[str] = set()
    found: list[float] = []
    for node in nodes:
        used = frozenset[str]().union(*(names.get(source, frozenset()) for source in node.all_input_nodes))
        if node in derived:
            names[node] = used
        fresh = frozenset() if node in derived else used - seen
        seen |= fresh
        found.append(sum(traced.tensors[name].nbytes for name in fresh))
    return found


def _stretches(sizes: Mapping[int, int]) -> list[list[int]]:
    """The local minima of crossing bytes, each as the positions of a flat stretch."""
    flat = [list(stretch) for _, stretch in itertools.groupby(sizes, sizes.__getitem__)]
    heights = [sizes[stretch[0]] for stretch in flat]
    return [
        stretch
        for number, stretch in enumerate(flat)
        if (number == 0 or heights[number - 1] > heights[number])
        and (number + 1 == len(flat) or heights[number + 1] > heights[number])
    ]


def _thin(places: list[int], sizes: Mapping[int, int], work: list[float]) -> list[int]:
    """The places without a better neighbour or a much better place near by; at most `MAX_PLACES`, those with
    the fewest crossing bytes, in order."""
    near = _NEARBY * work[-1]

    def beaten(number: int, place: int) -> bool:
        close = [other for other in places if abs(work[other] - work[place]) <= near]
        beside = [other for other in places[max(0, number - 1) : number + 2] if other in close]
        return sizes[place] > min(
            min(sizes[other] for other in beside), _MUCH_WORSE * min(sizes[other] for other in close)
        )

    good = [place for number, place in enumerate(places) if not beaten(number, place)]
    return sorted(sorted(good, key=lambda place: (sizes[place], place))[:MAX_PLACES])
