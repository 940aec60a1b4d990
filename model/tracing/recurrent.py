"""Splits torch's LSTM, GRU and RNN into one operation per layer, so that cuts may go between layers.

torch runs all layers as one operation. Per layer it is the same computation in the same order: on a CPU with
the same bits, dropout included. A layer's module path is its module's with ".l0", ".l1", ... appended, as in
the names of its parameters; `Training.cuts` may name it.

Uses the schema of aten.lstm and its siblings: checked with torch 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..precision import Precision
from ..torch_private.pytree import tree_leaves
from .regions import autocast_of

_aten = torch.ops.aten
_RECURRENT = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)
_KEPT = ("nn_module_stack", "stack_trace", "torch_fn", "autocast")


def split_layers(graph: fx.Graph, precision: Precision) -> None:
    """Rewrite `graph` in place: each recurrent operation of several layers becomes one for each layer.

    `precision` of the trace determines the types of values.
    """
    for target in _RECURRENT:
        for node in graph.find_nodes(op="call_function", target=target):
            if len(node.args) == 9 and not node.kwargs and node.args[4] > 1:
                _Layers(graph, node, precision).write()
    graph.lint()


class _Layers:
    """Rewrites one operation of several layers."""

    def __init__(self, graph: fx.Graph, node: fx.Node, precision: Precision) -> None:
        self._graph = graph
        self._node = node
        self._precision: Precision = precision
        self._layer = 0

    def write(self) -> None:
        node: Any = self._node
        x, states, parameters, _, num_layers, dropout, train, both_ways, batch_first = node.args
        each, directions = len(parameters) // num_layers, 2 if both_ways else 1
        ends: list[Sequence[fx.Node]] = []
        with self._graph.inserting_before(node):
            if batch_first:  # as in torch, layers run with time as the first dimension
                x = self._add(_aten.transpose.int, x, 0, 1)
            for layer in range(num_layers):
                self._layer = layer
                if layer and dropout and train:
                    x = self._add(_aten.dropout.default, x, dropout, train)
                begin = fx.map_arg(states, self._part_of(layer * directions, directions))
                own = parameters[layer * each : (layer + 1) * each]
                x, *end = self._run(x, begin, own)
                ends.append(end)
            if batch_first:
                x = self._add(_aten.transpose.int, x, 0, 1)
            for user in list(node.users):
                index = user.args[1]
                if user.users:
                    value = x if index == 0 else self._joined([end[index - 1] for end in ends])
                    user.replace_all_uses_with(value)
                self._graph.erase_node(user)
        self._graph.erase_node(node)

    def _part_of(self, first: int, count: int) -> Callable[[fx.Node], fx.Node]:
        """Selects one layer's states from those of all layers."""
        return lambda state: self._add(_aten.slice.Tensor, state, 0, first, first + count)

    def _run(self, x: fx.Node, begin: Any, own: Sequence[fx.Node]) -> list[fx.Node]:
        """Add one layer; return its output and last states."""
        node: Any = self._node
        made = self._add(node.target, x, begin, own, node.args[3], 1, 0.0, node.args[6], node.args[7], False)
        return [self._add(operator.getitem, made, index) for index in range(len(made.meta["val"]))]

    def _joined(self, states: Sequence[fx.Node]) -> fx.Node:
        return self._add(_aten.cat.default, list(states), 0)

    def _add(self, target: Any, *args: Any) -> fx.Node:
        """Add a node of the current layer, with its fake value."""
        node, graph = self._node, self._graph
        made = graph.call_function(target, args)
        made.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        if (stack := node.meta.get("nn_module_stack")) is not None:
            made.meta["nn_module_stack"] = self._with_layer(stack)
        values = fx.map_arg(args, lambda used: used.meta["val"])
        fake_mode: Any = next(leaf.fake_mode for leaf in tree_leaves(node.meta["val"]))
        with fake_mode, torch.no_grad(), autocast_of(node, self._precision):
            made.meta["val"] = target(*values)
        return made

    def _with_layer(self, stack: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        key = next(reversed(stack))
        path, kind = stack[key]
        layer, name = f".l{self._layer}", kind if isinstance(kind, str) else kind.__name__
        return {**stack, key + layer: (path + layer, f"{name}.layer")}
