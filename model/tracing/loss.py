"""Finds which of the model's outputs the loss leads back to: what only the others depend on is not trained.

The loss is called once with tensors that have no values. So what it uses cannot depend on values, and holds
for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_private.fake_tensors import without_values
from ..torch_private.pytree import TreeSpec, tree_unflatten
from ..training import Loss, sum_and_weight


def outputs_with_gradient(
    loss: Callable[[Any, dict[str, Tensor]], Loss],
    graph: fx.Graph,
    out_spec: TreeSpec,
    batch: Mapping[str, Tensor],
    flowing: set[fx.Node],
) -> set[fx.Node]:
    """The graph's outputs that get a gradient from the loss, of those in `flowing`, which could pass one on.

    All of them where the loss looks at values, or cannot be called without.
    """
    results: Any = graph.output_node().args[0]
    candidates = [node for node in graph.output_node().all_input_nodes if node in flowing]
    if len(candidates) < 2:
        return set(candidates)
    with without_values(), torch.enable_grad():
        leaves = {node: _like(node.meta["val"]).requires_grad_() for node in candidates}
        # As a result has a history, and a loss may write into it, no leaf is given.
        given = {node: leaf.clone() for node, leaf in leaves.items()}
        fakes = {name: _like(value) for name, value in batch.items()}

        def made(result: Any) -> Any:
            if not isinstance(result, fx.Node):
                return result
            return given[result] if result in given else _like(result.meta["val"])

        output = tree_unflatten([made(result) for result in results], out_spec)
        try:
            total, _ = sum_and_weight(loss(output, fakes))
            found: Any = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        except Exception:  # if the loss is wrong, it says so when it is called with values
            return set(candidates)
    return {node for node, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
