"""Gradient flow: the values of a graph through which a gradient may reach a trainable parameter, and the
outputs that the loss leads back to: what only the others depend on is not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_private.fake_tensors import without_values
from ..torch_private.pytree import TreeSpec, tree_unflatten
from ..training import Loss, sum_and_weight
from .functional import written
from .nodes import empty_like, storage_of, tensors_of

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


def outputs_with_gradient(
    loss: Callable[[Any, dict[str, Tensor]], Loss],
    graph: fx.Graph,
    out_spec: TreeSpec,
    batch: Mapping[str, Tensor],
    flowing: set[fx.Node],
) -> set[fx.Node]:
    """The graph's outputs that get a gradient from the loss, of those in `flowing`, which could pass one on.

    The loss is called once with tensors that have no values. So what it uses cannot depend on values, and
    holds for every micro-batch. All of them where the loss looks at values, or cannot be called without.
    """
    results: Any = graph.output_node().args[0]
    candidates = [node for node in graph.output_node().all_input_nodes if node in flowing]
    if len(candidates) < 2:
        return set(candidates)
    with without_values(), torch.enable_grad():
        leaves = {node: empty_like(node.meta["val"]).requires_grad_() for node in candidates}
        # As a result has a history, and a loss may write into it, no leaf is given.
        given = {node: leaf.clone() for node, leaf in leaves.items()}
        fakes = {name: empty_like(value) for name, value in batch.items()}

        def made(result: Any) -> Any:
            if not isinstance(result, fx.Node):
                return result
            return given[result] if result in given else empty_like(result.meta["val"])

        output = tree_unflatten([made(result) for result in results], out_spec)
        try:
            total, _ = sum_and_weight(loss(output, fakes))
            found: Any = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        except Exception:  # if the loss is wrong, it says so when it is called with values
            return set(candidates)
    return {node for node, gradient in zip(leaves, found, strict=True) if gradient is not None}


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
            flows = records and self.reads(node) and _may_require_grad(node)
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


def _may_require_grad(node: fx.Node) -> bool:
    """Whether a result may require a gradient: of a tuple, any tensor in it; if unknown, yes."""
    dtypes = [tensor.dtype for tensor in tensors_of([node])]
    return not dtypes or any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
