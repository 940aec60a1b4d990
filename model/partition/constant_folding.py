"""What a section derives from nothing that changes is computed once, not for every micro-batch.

A causal mask, positions, rotary tables of a fixed length: made from sizes, constants and buffers that are not
part of the state. They are evaluated when the section is set up, and handed to its graph as further inputs.
Random operations, writes, parameters and entries of the batch end this; so do large values, since each
section keeps its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..precision import Precision
from ..tracing.functional import written_spans
from ..tracing.regions import autocast_of
from .rematerialized import is_pure

KEPT_BYTES = 4 << 20
"""Of a value that is kept: a causal mask of 2048 positions. Beside weights that is little."""
_PASSING_BYTES = 64 << 20  # of a value on the way to one that is kept


def fold(
    module: fx.GraphModule, known: Mapping[int, Tensor], device: torch.device, precision: Precision
) -> tuple[fx.GraphModule, list[Tensor]]:
    """(the section without what is computed here, the values that it takes after its other arguments).

    `known`: argument's position -> a tensor that never changes. `module` stays as it is.
    """
    graph = copy.deepcopy(module.graph)
    places = list(graph.find_nodes(op="placeholder"))
    given = {places[position]: tensor for position, tensor in known.items()}
    fixed = _fixed(graph, given)
    kept, left = _kept(fixed)
    if not kept:
        return module, []
    values = _evaluate(fixed, given, device, precision)
    for node in kept:
        with graph.inserting_after(places[-1]):
            place = graph.placeholder(f"folded_{len(places)}")
        place.meta = dict(node.meta)
        places.append(place)
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in fixed or user in left)
    for node in reversed(list(fixed)):
        if node not in left:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph), [values[node] for node in kept]


def _fixed(graph: fx.Graph, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, None]:
    """The operations that give the same every time, in order."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    barred = {node for first, last in written_spans(nodes) for node in nodes[first : last + 1]}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in barred or not is_pure(node) or not 0 < _bytes(node) <= _PASSING_BYTES:
            continue
        if all(used in found or used in given for used in node.all_input_nodes):
            found[node] = None
    return found


def _kept(fixed: Mapping[fx.Node, None]) -> tuple[list[fx.Node], set[fx.Node]]:
    """(those whose values are kept, those that are left in the graph): what the rest of the graph uses."""
    kept: list[fx.Node] = []
    left: set[fx.Node] = set()
    for node in reversed(list(fixed)):
        outside = [user for user in node.users if user not in fixed or user in left]
        # The user's loss gets the outputs, and may write them: those are made anew.
        if any(user.op == "output" for user in outside) or (outside and _storage_bytes(node) > KEPT_BYTES):
            left.add(node)
        elif outside:
            kept.append(node)
    return kept[::-1], left


def _evaluate(
    fixed: Mapping[fx.Node, None],
    given: Mapping[fx.Node, Tensor],
    device: torch.device,
    precision: Precision,
) -> dict[fx.Node, Tensor]:
    values: dict[fx.Node, Any] = dict(given)
    for node in fixed:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        with torch.no_grad(), autocast_of(node, precision, device.type):
            values[node] = target(*args, **kwargs)
    return values


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _storage_bytes(node: fx.Node) -> int:
    """A small view keeps all the memory that it looks at."""
    value: Any = node.meta["val"]
    return value.untyped_storage().nbytes()
