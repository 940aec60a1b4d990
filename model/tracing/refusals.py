"""Operations in a graph that no section can run, or that would give other numbers there."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..errors import UntraceableModel
from ..torch_private.exporting import TRANSFORMS
from ..torch_private.higher_order import higher_order_name
from ..torch_private.operators import is_random
from .exporting import TRANSFORM
from .nodes import bodies_of, tensors_of, value_of
from .source import stack_line

SPARSE = (
    "a sparse tensor, which has no memory that could be sent or laid out. Use dense matrices, or index_add "
    "and scatter_add over lists of edges"
)


def refuse_operations(module: fx.GraphModule) -> None:
    """Raise `UntraceableModel` for what no section can run, in the graph or in functions that its operations
    are given."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _refuse_values_in_python(part.graph)
            _refuse_sparse(part.graph)
            _refuse_draws(part.graph)


def _refuse_sparse(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if any(value.layout != torch.strided for value in tensors_of([node])):
            raise UntraceableModel(f"forward makes {SPARSE}", stack_line(node))


def _refuse_draws(graph: fx.Graph) -> None:
    """Refuse random numbers in the functions of torch.cond, map and scan: for the backward, torch runs the
    functions of torch.cond and map once more and draws again, so that gradients belong to other numbers."""
    bodies = [body for node in graph.nodes if _is_control_flow(node) for body in bodies_of(node)]
    parts = [part for body in bodies for part in body.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        if is_random(node.target, node.args, node.kwargs):
            raise UntraceableModel(
                f"{node.target} draws random numbers in a function that torch.cond, map or scan is given: "
                "for the backward torch may run it once more and draw others. Draw before, and give the "
                "numbers to the function (a mask, instead of dropout)",
                stack_line(node),
            )


def _is_control_flow(node: fx.Node) -> bool:
    return higher_order_name(node.target) in ("cond", "map_impl", "scan")


def _refuse_values_in_python(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if getattr(node.target, "__module__", "") == TRANSFORMS:
            raise UntraceableModel(TRANSFORM, stack_line(node))
        if higher_order_name(node.target) == "while_loop":
            raise UntraceableModel(
                "while_loop runs as often as the values of a tensor say, so neither its memory nor its time "
                "is known before: run a fixed number of turns (for _ in range(n)), and let torch.where end "
                "them",
                stack_line(node),
            )
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        _refuse_symbol(node)
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            _refuse_symbol(node)
        if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            _refuse_symbol(node)


def _refuse_symbol(node: fx.Node) -> None:
    raise UntraceableModel(
        f"{node.target} makes a Python number or a shape from the values of a tensor; keep it a tensor "
        "(torch.where, masks, multiplication)",
        stack_line(node),
    )
