"""Constant folding: computes a section's constant values once, not for every micro-batch.

A causal mask, positions, rotary tables of a fixed length depend only on sizes, constants and buffers outside
the state. They are evaluated when the section is set up, and passed to its graph as further inputs. Values
that depend on random operations, writes, parameters or entries of the batch are not folded, nor are large
ones, because each section keeps its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..precision import Precision
from ..tracing.functional import nodes_in_writing
from ..tracing.nodes import value_of
from ..tracing.regions import autocast_of
from .rematerialized import is_pure

KEPT_BYTES = 4 << 20
"""The largest value that is kept: a causal mask of 2048 positions, which is small beside the weights."""
_PASSING_BYTES = 64 << 20  # the largest intermediate value on the way to one that is kept


def fold(
    module: fx.GraphModule, known: Mapping[int, Tensor], device: torch.device, precision: Precision
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Fold constants: (the section without them, their values, which it takes after its other arguments).

    `known`: {position of an argument: a tensor that never changes}. `module` is not modified.
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
    """The operations whose results are constant, in order."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    barred = nodes_in_writing(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in barred or not is_pure(node) or not 0 < _bytes(node) <= _PASSING_BYTES:
            continue
        if all(used in found or used in given for used in node.all_input_nodes):
            found[node] = None
    return found


def _kept(fixed: Mapping[fx.Node, None]) -> tuple[list[fx.Node], set[fx.Node]]:
    """(operations whose values are kept, operations left in the graph): those that the rest uses."""
    kept: list[fx.Node] = []
    left: set[fx.Node] = set()
    for node in reversed(list(fixed)):
        outside = [user for user in node.users if user not in fixed or user in left]
        # The user's loss gets the outputs and may write them, so they are computed each time.
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
    value = value_of(node)
    return value.nbytes if isinstance(value, Tensor) else 0


def _storage_bytes(node: fx.Node) -> int:
    """Bytes of the whole storage: a small view keeps all of it alive."""
    return value_of(node).untyped_storage().nbytes()
