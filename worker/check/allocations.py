"""The bytes that operations of a graph make in a forward with autograd, from shapes alone.

A composite operator runs as several others: attention with dropout holds its scores several times over, an
LSTM its gates at every step. So each operation is run on fake tensors, and all results that have memory of
their own are counted.

Runs operations on fake tensors, which take the way that real ones take: checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...model.partition.flops import body_of, compute_nodes, signature
from ...model.precision import Precision
from ...model.tracing.flow import gradient_flow
from ...model.tracing.functional import written
from ...model.tracing.regions import autocast_of
from ...model.tracing.trace import TracedModel


def allocations(traced: TracedModel) -> dict[str, int]:
    """Bytes by the name of the graph's node. An upper bound for what is kept for the backward: what a
    composite operator needs for a moment only is counted as well."""
    trained = [place for place, name in traced.parameters.items() if name in traced.trainable]
    flowing = gradient_flow(traced.graph, trained)
    known: dict[Any, int] = {}
    return {node.name: _bytes(node, flowing, traced.precision, known) for node in compute_nodes(traced.graph)}


def _bytes(node: fx.Node, flowing: set[fx.Node], precision: Precision, known: dict[Any, int]) -> int:
    body = body_of(node)
    if body is not None:
        inner = compute_nodes(body)
        return sum(_bytes(part, set(inner), precision, known) for part in inner)
    if not isinstance(node.target, OpOverload):
        return 0  # access to one of several results
    key = signature(node), tuple(used in flowing for used in node.all_input_nodes)
    if key not in known:
        known[key] = _made_by(node, flowing, precision)
    return known[key]


def _made_by(node: fx.Node, flowing: set[fx.Node], precision: Precision) -> int:
    target: Any = node.target
    results = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, FakeTensor)]
    if not results:
        return 0
    changed = set(written(node))  # for which autograd takes no leaf that needs a gradient

    def given(used: fx.Node) -> Any:
        needs_grad = used in flowing and used not in changed
        return tree_map(partial(_like, needs_grad=needs_grad), used.meta.get("val"))

    with results[0].fake_mode, _without_onednn():
        args, kwargs = fx.map_arg((node.args, node.kwargs), given)
        with _Counter(tree_leaves((args, kwargs))) as counter, autocast_of(node, precision):
            target(*args, **kwargs)
    return counter.num_bytes


@contextmanager
def _without_onednn() -> Generator[None]:
    """oneDNN's recurrent layers do not say how large their workspace is; step by step, they take more."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _like(value: Any, needs_grad: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_() if needs_grad and fresh.dtype.is_floating_point else fresh


class _Counter(TorchDispatchMode):
    """Adds up the memory of all results that is not the memory of an earlier one."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self.num_bytes = 0
        self._known: dict[int, Tensor] = {}  # the tensors live, so that no memory gets another's place
        self._note(given)

    def _note(self, values: Iterable[Any]) -> int:
        size_bytes = 0
        for value in values:
            if isinstance(value, Tensor) and (place := _place(value)) not in self._known:
                self._known[place] = value
                size_bytes += value.untyped_storage().nbytes()
        return size_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.num_bytes += self._note(tree_leaves(returned))
        return returned


def _place(value: Tensor) -> int:
    return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
