"""Oobleck's rules after failures, written from the paper: what our re-forming is compared with.

Nodes have one device each. There is a template for each number of nodes from n0 on (§4.1), as good as can
be for four micro-batches a stage (§4.1.2). Pipelines that lost nobody stay as they are; each of the others
(§5.1, Figure 8)

* is reinstantiated from the template of as many nodes as it has left;
* or, if there is none, borrows nodes of larger pipelines, which are reinstantiated too, until it has n0;
* or, if none can yield a node, is merged with another.

Then the batch is dealt anew (§5.2). What the paper leaves open is done in favour of its rules: the largest
pipeline lends, the smallest is merged with, nodes take those stages of their pipeline of which they hold
most, templates are found exactly, and the batch is dealt by what the shares take, not in proportion to what
one micro-batch takes (Equation 6).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from makara.morphing import Template, templates
from makara.morphing.stages import Mode, StageTable
from makara.pipeline import Range

IMPOSSIBLE = -1


@dataclass(frozen=True)
class Pipeline:
    """`nodes` in the order of the template's stages; without a template, those left of a broken pipeline."""

    nodes: tuple[str, ...]
    template: Template | None


def all_templates(
    table: StageTable, num_nodes: int, capacity_bytes: int, *, recompute: bool
) -> Mapping[int, Template]:
    """{number of nodes: its template}."""
    found: dict[int, Template] = {}
    for size in range(1, min(num_nodes, table.num_sections) + 1):
        best = templates(table, 4 * size, size, 1, capacity_bytes, Mode(recompute))
        if size in best:
            found[size] = best[size]
    return found


class Rules:
    """One application of the rules. `weights`: bytes of each section, by which nodes are given stages."""

    def __init__(
        self, choices: Mapping[int, Template], holding: Mapping[str, Range], weights: Sequence[int]
    ) -> None:
        self._choices = choices
        self._least = min(choices)
        self._holding = holding
        self._sums = [0, *accumulate(weights)]
        self._whole = list[Pipeline]()
        self._again = list[list[str]]()  # nodes that are given the template of their number

    def re_formed(self, pipelines: Sequence[Pipeline], dead: Collection[str]) -> list[Pipeline]:
        """The pipelines after the nodes `dead` failed, each with a template. At least n0 must be left."""
        broken = list[list[str]]()
        for one in pipelines:
            left = [node for node in one.nodes if node not in dead]
            if one.template is not None and len(left) == len(one.nodes):
                self._whole.append(one)
            elif left:
                broken.append(left)
        for nodes in sorted(broken, key=len, reverse=True):
            enough = self._enough(nodes)
            self._again.append(enough)
        return [*self._whole, *map(self._instantiated, self._again)]

    def _enough(self, nodes: list[str]) -> list[str]:
        """The nodes, with borrowed ones or those of pipelines merged with, if they are fewer than n0."""
        while len(nodes) < self._least:
            others = [list(one.nodes) for one in self._whole] + self._again
            largest = max(others, key=len)
            if len(largest) > self._least:
                self._take_out(largest)
                nodes = [*nodes, largest[-1]]
                self._again.append(largest[:-1])
            else:
                smallest = min(others, key=len)
                self._take_out(smallest)
                nodes = [*smallest, *nodes]
        return nodes

    def _take_out(self, nodes: list[str]) -> None:
        self._whole = [one for one in self._whole if list(one.nodes) != nodes]
        self._again = [each for each in self._again if each != nodes]

    def _instantiated(self, nodes: Sequence[str]) -> Pipeline:
        """The nodes in an order in which they hold much of their stages.

        Those that hold something keep its order, and take the stages in which they keep most, found by
        dynamic programming; the others take what is left.
        """
        template = self._choices[len(nodes)]
        spans = [stage.range for stage in template.stages]
        held = {node: self._holding[node] for node in nodes if node in self._holding}
        holders = sorted(held, key=lambda node: (held[node].start + held[node].stop, held[node].start))
        # Entry i: the bytes that the first i holders keep in the stages so far, and which these are.
        best: list[tuple[int, tuple[int, ...]]] = [(0, ()), *[(IMPOSSIBLE, ())] * len(holders)]
        for place, span in enumerate(spans):
            for number in range(len(holders), 0, -1):
                before, places = best[number - 1]
                if before == IMPOSSIBLE:
                    continue
                kept = before + self._kept(held[holders[number - 1]], span)
                if kept > best[number][0]:
                    best[number] = kept, (*places, place)
        by_place = dict(zip(best[-1][1], holders, strict=True))
        rest = iter([node for node in nodes if node not in held])
        return Pipeline(
            tuple(by_place[p] if p in by_place else next(rest) for p in range(len(spans))), template
        )

    def _kept(self, held: Range, span: Range) -> int:
        start, stop = max(held.start, span.start), min(held.stop, span.stop)
        return self._sums[stop] - self._sums[start] if start < stop else 0


def dealt(made: Sequence[Template], num_micro_batches: int) -> list[int]:
    """Each pipeline's number of micro-batches: one each, and the next where it ends first."""
    shares = [1] * len(made)
    for _ in range(num_micro_batches - len(made)):
        ends = [one.time_ns(share + 1) for one, share in zip(made, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares
