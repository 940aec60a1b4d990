"""Flattens the user's `no_grad` and `autocast` regions, so that cuts may go through them.

While tracing, a region is a pair of marks in the graph. `flatten` removes the marks: inside `no_grad` every
operation reads detached values, and an operation inside `autocast` records its region's setting
(`meta["autocast"]`). `enter_regions` puts an autocast around such operations of a section.

Nested regions work as in eager: the innermost setting holds, also against the job's own precision.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ..precision import Precision, autocast
from ..torch_private.region_marks import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from .flow import GradientFlow
from .functional import written
from .nodes import insert_call, value_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Autocast:
    """The setting of an autocast region, on whatever device runs it."""

    dtype: torch.dtype
    enabled: bool


def flatten(graph: fx.Graph, trainable: Iterable[str]) -> None:
    """Remove the marks of regions from `graph`. `trainable`: placeholders that gradients flow to."""
    _Flattening(graph, set(trainable)).run()
    graph.lint()


def enter_regions(graph: fx.Graph) -> None:
    """Put an autocast around the operations of a section's `graph` that recorded one."""
    current: Autocast | None = None
    entered: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        wanted: Autocast | None = node.meta.get("autocast")
        if wanted == current:
            continue
        with graph.inserting_before(node):
            if entered is not None:
                graph.call_function(EXIT_AUTOCAST, (entered,))
            entered = None
            if wanted is not None:
                entered = graph.call_function(ENTER_AUTOCAST, ("cpu", wanted.dtype, wanted.enabled, True))
        current = wanted


def autocast_of(
    node: fx.Node, precision: Precision, device_type: str = "cpu"
) -> AbstractContextManager[object]:
    """The context in which `node` runs: that of its own region, else of the job's precision."""
    region: Autocast | None = node.meta.get("autocast")
    if region is None:
        return autocast(device_type, precision)
    return torch.autocast(device_type, region.dtype, enabled=region.enabled)


def set_device(node: fx.Node, device: torch.device) -> None:
    """Rewrite `node`, traced for the CPU, for `device`: devices among its arguments, autocast regions."""

    def moved(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) else leaf

    node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
    if node.target is ENTER_AUTOCAST:
        node.args = (device.type, *node.args[1:])


class _Flattening:
    """One pass over a graph in its order."""

    def __init__(self, graph: fx.Graph, trainable: set[str]) -> None:
        self._graph = graph
        self._flow = GradientFlow(trainable)
        self._detached: dict[fx.Node, fx.Node] = {}
        self._records = True
        self._autocasts: list[tuple[fx.Node, Autocast]] = []

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function":
                self._visit(node)
            else:
                self._flow.visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.target is SET_GRAD_ENABLED:
            self._records = bool(node.args[0])
            self._graph.erase_node(node)
        elif node.target is ENTER_AUTOCAST:
            _, dtype, enabled, *_ = node.args
            assert isinstance(dtype, torch.dtype)
            self._autocasts.append((node, Autocast(dtype, bool(enabled))))
        elif node.target is EXIT_AUTOCAST:
            opened = self._autocasts.pop()[0]
            assert node.args[0] is opened, "regions nest"
            self._graph.erase_node(node)
            self._graph.erase_node(opened)
        elif node.target is _aten._assert_tensor_metadata.default:
            self._graph.erase_node(node)  # it checks types and device of the trace, which may differ when run
        else:
            if node.target is _aten.detach_.default:
                self._make_detach(node)
            if self._autocasts:
                node.meta["autocast"] = self._autocasts[-1][1]
            if not self._records and self._flow.reads(node):
                self._silence(node)
            self._flow.visit(node, records=self._records)

    def _make_detach(self, node: fx.Node) -> None:
        """Replace `x.detach_()`, which writes no value: later uses of x read `x.detach()`."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        node.target = _aten.detach.default
        for user in [user for user in target.users if user is not node and node < user]:
            user.replace_input_with(target, node)

    def _silence(self, node: fx.Node) -> None:
        """Make `node`, inside `no_grad`, read detached values."""
        targets = [target for target in written(node) if target in self._flow.nodes]
        if node.target is operator.getitem:  # a tuple of results cannot be detached as a whole
            silent = _detach(node, node.next)
            node.replace_all_uses_with(silent, delete_user_cb=lambda user: user is not silent)
            return
        for used in node.all_input_nodes:
            if used in self._flow.nodes and isinstance(value_of(used), Tensor):
                if used not in self._detached:
                    self._detached[used] = _detach(used, node)
                node.replace_input_with(used, self._detached[used])
        if len(targets) == 1 and isinstance(value_of(node), Tensor):
            # As in eager, a tensor written inside the region keeps its autograd history.
            node.replace_all_uses_with(targets[0])


def _detach(node: fx.Node, before: fx.Node) -> fx.Node:
    return insert_call(before, _aten.detach.default, node, origin=node)
