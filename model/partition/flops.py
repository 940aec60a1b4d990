"""Counts the work of each operation of a graph from shapes alone: arithmetic plus memory traffic.

Uses torch.utils.flop_counter on the graph's fake values: checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from ..precision import Precision
from ..torch_private.higher_order import higher_order_name
from ..torch_private.operators import OpOverload
from ..torch_private.pytree import tree_leaves, tree_map
from ..tracing.nodes import bodies_of, empty_like, tensors_of, traffic_bytes, value_of
from ..tracing.regions import autocast_of

FLOPS_PER_BYTE = 5.0  # a core does about this many operations in the time of moving one byte
_KNOWN: dict[tuple[Any, ...], float] = {}  # by signature and precision: a graph is counted several times


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute, in order; a cut position is an index into this list."""
    return [node for node in graph.nodes if node.op in ("call_function", "get_attr")]


def work_per_node(nodes: Sequence[fx.Node], precision: Precision) -> list[float]:
    """Forward work of each node in floating-point operations (memory traffic converted).

    `precision` of the trace determines operand types. Results are cached by operation and shapes, because
    models repeat the same block many times.
    """
    return [_work(node, precision) for node in nodes]


def signature(node: fx.Node) -> tuple[Any, ...]:
    """A key that is equal for operations with equal work: target, shapes, types and plain arguments."""
    described = fx.map_arg((node.args, node.kwargs), _form)
    return (str(node.target), str(described), str(node.meta.get("autocast")))


def _turns(node: fx.Node) -> int:
    """How often a higher-order operation runs its graph: once for each row, in scan and map."""
    place = {"scan": 2, "map_impl": 1}.get(higher_order_name(node.target) or "")
    if place is None:
        return 1
    rows: Any = node.args[place]
    return int(value_of(rows[0]).shape[0])


def _work(node: fx.Node, precision: Precision) -> float:
    if bodies := bodies_of(node):
        most = max(sum(_work(inner, precision) for inner in compute_nodes(body.graph)) for body in bodies)
        return _turns(node) * most
    if not isinstance(node.target, OpOverload):
        return 0.0  # access to one of several results
    key = (*signature(node), precision)
    if key not in _KNOWN:
        moved = 0 if node.target.is_view else traffic_bytes(node)
        _KNOWN[key] = _flops(node, precision) + FLOPS_PER_BYTE * moved
    return _KNOWN[key]


def _flops(node: fx.Node, precision: Precision) -> float:
    leaves = tree_leaves(fx.map_arg((node.args, node.kwargs), value_of))
    fake_mode = next((mode for mode in map(_mode, [*leaves, value_of(node)]) if mode is not None), None)
    if fake_mode is None or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return 0.0  # makes a tensor from nothing, or checks something
    target: Any = node.target
    with fake_mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _like)
        with autocast_of(node, precision):
            target(*args, **kwargs)
    return float(counter.get_total_flops())


def _like(node: fx.Node) -> Any:
    """A new fake tensor of the same form: the operation may write it."""
    return tree_map(_empty_like, value_of(node))


def _empty_like(leaf: Any) -> Any:
    return empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def _mode(value: Any) -> Any:
    return getattr(value, "fake_mode", None)


def _form(node: fx.Node) -> Any:
    return str([(str(v.dtype), tuple(v.shape), v.stride()) for v in tensors_of([node])])
