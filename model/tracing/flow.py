"""Gradient flow: the values of a graph through which a gradient may reach a trainable parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_private.pytree import tree_leaves
from .functional import storage_of, written

_aten = torch.ops.aten
_DETACHING = (_aten.detach.default, _aten.detach_.default, _aten.detach_copy.default)


def gradient_flow(graph: fx.Graph, trainable: Iterable[str]) -> set[fx.Node]:
    """The nodes of `graph` through which a gradient may flow to one of the placeholders `trainable`."""
    flow = GradientFlow(trainable)
    for node in graph.nodes:
        flow.visit(node)
    return flow.nodes


def reached_parameters(graph: fx.Graph, flowing: set[fx.Node], outputs: set[fx.Node]) -> set[str]:
    """The placeholders to which a gradient flows from these outputs of the graph, through `flowing`."""
    reached = set(outputs)
    storages = {storage_of(node) or 0 for node in outputs}
    for node in reversed(graph.nodes):
        writes = any(storage_of(target) in storages - {0} for target in written(node))
        if not (node in flowing and (node in reached or writes)):
            continue
        for used in node.all_input_nodes:
            if used in flowing:
                reached.add(used)
                storages.add(storage_of(used) or 0)
    return {node.name for node in reached if node.op == "placeholder"}


class GradientFlow:
    """Visits a graph in order. A tensor into which a flowing value is written flows, and so do its views."""

    def __init__(self, trainable: Iterable[str]) -> None:
        """`trainable`: the placeholders of trainable parameters."""
        self._trainable = frozenset(trainable)
        self._by_storage: dict[int, list[fx.Node]] = {}
        self.nodes: set[fx.Node] = set()

    def visit(self, node: fx.Node, *, records: bool = True) -> bool:
        """Whether a gradient may flow through `node`; `records` False: it runs inside `no_grad`."""
        if node.op == "placeholder":
            flows = node.name in self._trainable
        else:
            flows = records and self.reads(node) and _may_require_grad(node.meta.get("val"))
        storage = storage_of(node)
        if storage is not None:
            self._by_storage.setdefault(storage, []).append(node)
        if flows:
            self.nodes.add(node)
            for target in written(node):
                self.nodes.update(self._by_storage.get(storage_of(target) or 0, ()))
        return flows

    def reads(self, node: fx.Node) -> bool:
        """Whether `node` would pass on a gradient to something that it reads."""
        return node.target not in _DETACHING and any(used in self.nodes for used in node.all_input_nodes)


def _may_require_grad(value: Any) -> bool:
    """Whether a value may require a gradient: of a tuple of results, any tensor in it; if unknown, yes."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return not leaves or any(leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in leaves)
