"""Backwards in two operations: I, the gradients of a section's inputs, and later W, those of its parameters.

In the autograd graph of a section, the nodes on the way from its outputs to its inputs are the *spine*. The
gradient of a parameter branches off at one of them: I runs the spine and keeps what flows into the nodes
where parameters branch off; W runs each of those nodes once more, for its parameters alone. So every kernel
that a whole backward runs is run once, on the same values, and the bits are the same.

That takes a parameter that branches off at one node by one way, and a node that computes the two apart. A
section in which some parameter is used twice, or with a fused recurrent network, cannot be split. Nor can one
with an `autograd.Function`: its backward may draw random numbers, and would draw others in I and in W.

torch splits backwards too (torch.distributed.pipelining, private), by another rule: it runs W for all uses of
a parameter at once, which goes through parts of the spine again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from . import engine


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node of the spine, by its place in the walk, at which `parameters` branch off. `outputs`: those of
    the node's results that a gradient reaches."""

    place: int
    name: str
    outputs: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Where a graph is cut in two, and all that have its form.

    `walk`: how the nodes are found from the roots: each is an edge of one before it.
    """

    walk: tuple[tuple[int, int], ...]
    branches: tuple[_Branch, ...]


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """What W needs from I: edges into nodes of the graph, the gradients that flowed there, and what for."""

    parts: tuple[tuple[tuple[GradientEdge, ...], tuple[Tensor, ...], tuple[str, ...]], ...]


class CannotSplit(Exception):
    """Of the parameter or by the function that is named, gradients cannot be computed apart from those of the
    inputs."""


_OPERATOR = "GeneratedBackwardFor"  # begins names of nodes of operators, which a tag says to draw, if they do
_FUSED = "Rnn"  # in names of nodes that compute all gradients at once: RNN, LSTM and GRU of any library


def find_split(roots: Sequence[Tensor], leaves: Iterable[Tensor], parameters: Mapping[str, Tensor]) -> Split:
    """Where the graph of a section is to be cut. Raises `CannotSplit`."""
    walk, nodes = _walk([get_gradient_edge(root).node for root in roots])
    incoming: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for node in nodes:
        if isinstance(node, BackwardCFunction) and not node.name().startswith(_OPERATOR):
            raise CannotSplit(node.name())
        for child, output in node.next_functions:
            if child is not None:
                incoming[child].append((node, output))
    for root in roots:
        edge = get_gradient_edge(root)
        incoming[edge.node].append((edge.node, edge.output_nr))
    spine = _above([get_gradient_edge(leaf).node for leaf in leaves], incoming)
    found: dict[Node, list[str]] = {}
    for name, parameter in parameters.items():
        node = get_gradient_edge(parameter).node
        if node not in incoming:
            continue  # it gets no gradient
        while node not in spine:
            if len(incoming[node]) != 1 or incoming[node][0][0] is node:
                raise CannotSplit(name)
            node = incoming[node][0][0]
        if _FUSED in node.name():
            raise CannotSplit(name)
        found.setdefault(node, []).append(name)
    places = {node: place for place, node in enumerate(nodes)}
    branches = [
        _Branch(
            places[node],
            node.name(),
            tuple(sorted({output for _, output in incoming[node]})),
            tuple(names),
        )
        for node, names in found.items()
    ]
    return Split(tuple(walk), tuple(branches))


def input_gradients(
    split: Split, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], PendingWeights]:
    """The gradients of `leaves`, and what `weight_gradients` needs. `seeds`: the gradients of `roots`."""
    nodes = [get_gradient_edge(root).node for root in roots]
    for place, edge in split.walk:
        child = nodes[place].next_functions[edge][0]
        assert child is not None, "the graph has the form of the one that was looked at"
        nodes.append(child)
    edges: list[GradientEdge] = []
    for branch in split.branches:
        node = nodes[branch.place]
        assert node.name() == branch.name, "the graph has the form of the one that was looked at"
        edges += [GradientEdge(node, output) for output in branch.outputs]
    found = engine.gradients(roots, seeds, [*leaves, *edges], keep_graph=True)
    flowed = iter(zip(edges, found[len(leaves) :], strict=True))
    parts: list[tuple[tuple[GradientEdge, ...], tuple[Tensor, ...], tuple[str, ...]]] = []
    for branch in split.branches:
        taken = [(edge, value) for edge, value in (next(flowed) for _ in branch.outputs) if value is not None]
        if taken:
            into, values = zip(*taken, strict=True)
            parts.append((into, values, branch.parameters))
    return found[: len(leaves)], PendingWeights(tuple(parts))


def weight_gradients(pending: PendingWeights, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the parameters, by name; one without gradient is left out. Frees the graph."""
    result: dict[str, Tensor] = {}
    for edges, values, names in pending.parts:
        found = engine.gradients(edges, values, [parameters[name] for name in names])
        result |= {name: value for name, value in zip(names, found, strict=True) if value is not None}
    return result


def _walk(roots: Sequence[Node]) -> tuple[list[tuple[int, int]], list[Node]]:
    """All nodes below the roots, and for each but the roots (place of a node before it, index of its
    edge)."""
    nodes = list(roots)
    seen = set(nodes)
    walk: list[tuple[int, int]] = []
    for place, node in enumerate(nodes):  # which grows meanwhile
        for edge, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
                walk.append((place, edge))
    return walk, nodes


def _above(below: Iterable[Node], incoming: Mapping[Node, Sequence[tuple[Node, int]]]) -> set[Node]:
    """The nodes from which one of `below` can be reached, these included."""
    found = {node for node in below if node in incoming}
    todo = list(found)
    while todo:
        for node, _ in incoming[todo.pop()]:
            if node not in found:
                found.add(node)
                todo.append(node)
    return found
