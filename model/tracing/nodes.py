"""The fake values that torch.export keeps with the nodes of a graph, and new nodes that have them too."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_private.pytree import tree_leaves
from ..torch_private.storages import storage_key


def value_of(node: fx.Node) -> Any:
    """The fake result of `node`: a tensor, a tuple of results, a plain value; None if it has none."""
    return node.meta.get("val")


def empty_like(tensor: Tensor) -> Tensor:
    """A new tensor of the same shape, strides and type, of any layout; fake under a fake mode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def tensors_of(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """The fake tensors among the results of `nodes`."""
    return [leaf for leaf in tree_leaves([value_of(node) for node in nodes]) if isinstance(leaf, Tensor)]


def traffic_bytes(node: fx.Node) -> int:
    """The size of all that `node` reads and makes."""
    return sum(tensor.nbytes for tensor in tensors_of([*node.all_input_nodes, node]))


def bodies_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operation is given: both branches of torch.cond, for one."""
    owner: Any = node.graph.owning_module
    used = [str(used.target) for used in node.all_input_nodes if used.op == "get_attr"]
    found = [attrgetter(name)(owner) for name in used]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def storage_of(node: fx.Node) -> int | None:
    """A number for the memory of the node's result, the same for all views of it; None if it is no tensor."""
    value = value_of(node)
    return storage_key(value) if isinstance(value, Tensor) else None


def insert_call(before: fx.Node, target: Any, argument: fx.Node, origin: fx.Node) -> fx.Node:
    """Insert `target(argument)` before a node; it names the user's line and modules of `origin`."""
    with before.graph.inserting_before(before):
        call = before.graph.call_function(target, (argument,))
    value: Any = argument.meta["val"]
    with value.fake_mode, torch.no_grad():
        call.meta["val"] = target(value)
    for key in ("stack_trace", "nn_module_stack"):
        call.meta[key] = origin.meta.get(key)
    return call
