"""Memory layouts: what a trace says of them holds when a section runs.

State is stored, and values are sent, contiguous. But whether a view is possible, whether `contiguous` or
`reshape` copies, and so what a write changes, follows from the layouts that the trace saw. So a section's
graph gets every tensor with its dimensions in the trace's order in memory. Gaps between elements, and
elements that share memory, are not made again; `keep_copies` and `strided_spans` care for what follows from
these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from ..errors import UntraceableModel
from ..torch_private.operators import may_return_its_argument
from .functional import written
from .nodes import storage_of
from .source import stack_line

_aten = torch.ops.aten
_STRIDED = {_aten.as_strided, _aten.as_strided_, _aten.as_strided_copy, _aten.as_strided_scatter}


def memory_order(traced: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the outermost in memory to the innermost; None if it is contiguous."""
    if traced.is_contiguous():
        return None
    strides = torch.empty_like(traced).stride()  # of dense memory, in this order
    order = tuple(sorted(range(traced.ndim), key=lambda dimension: -strides[dimension]))
    return None if order == tuple(range(traced.ndim)) else order


def laid_out(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """A contiguous tensor's values with the dimensions in this order in memory; gradients flow through."""
    if order is None:
        return tensor
    places = [order.index(dimension) for dimension in range(len(order))]
    return tensor.permute(order).contiguous().permute(places)


def keep_copies(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Copy what the trace says is a copy and is written later, or whose original is: of memory without gaps
    `contiguous` and the like would return their argument itself. Returns {node: its copy, which its users
    now read}."""
    changed = {storage_of(target) for node in graph.nodes for target in written(node)} - {None}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if changed & _apart(node):
            copies[node] = _copy(graph, node)
    return copies


def strided_spans(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """(first, last) positions in `nodes` between which memory is made and last read by strides of the
    user's own, which may reach beyond the value that they are applied to: no cut inside."""
    first: dict[int | None, int] = {}
    spans: dict[int | None, tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        first.setdefault(storage_of(node), position)
        if _is_strided(node):
            memory = _memory_read(node)
            spans[memory] = (first.get(memory, position), position)
    return [*spans.values()]


def refuse_strided_parts(graph: fx.Graph, lifted: Mapping[str, str]) -> None:
    """Raise `UntraceableModel` where `as_strided` reads a tensor of `lifted` ({placeholder: name}) that is a
    part of a larger one, of which a section has no more than the part."""
    places = [place for place in graph.find_nodes(op="placeholder") if place.name in lifted]
    parts = {storage_of(place): lifted[place.name] for place in places if _is_part(place.meta["val"])}
    for node in graph.nodes:
        name = parts.get(_memory_read(node)) if _is_strided(node) else None
        if name is not None:
            raise UntraceableModel(
                f"forward reads {name!r} by as_strided, and it is a part of a larger tensor, or its elements "
                "share memory: where a section runs it has memory of its own. Use slices or unfold, or keep "
                "the larger tensor",
                stack_line(node),
            )


def _is_strided(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _STRIDED


def _memory_read(node: fx.Node) -> int | None:
    given = node.args[0]
    assert isinstance(given, fx.Node), "as_strided is of a tensor"
    return storage_of(given)


def _is_part(value: Tensor) -> bool:
    return (
        value.untyped_storage().nbytes() != value.nbytes or torch.empty_like(value).stride() != value.stride()
    )


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        copy = graph.call_function(_aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


def _apart(node: fx.Node) -> set[int | None]:
    """The memory of `node` and of its argument, if these are two, which might be one in another layout."""
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node) or not may_return_its_argument(node.target):
        return set()
    memory = {storage_of(node), storage_of(given)}
    if None in memory or len(memory) == 1 or node.meta["val"].dtype != given.meta["val"].dtype:
        return set()
    return memory
