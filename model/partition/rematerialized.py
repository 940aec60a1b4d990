"""Finds values that each section recomputes for itself instead of receiving them over cuts (Varuna §5.1).

Masks, positions and rotary tables are functions of the batch's entries; T5's position bias is a function of a
small parameter, joined with a mask. Each section that uses such a value computes it, so that usually one
tensor crosses a cut: the hidden state. A parameter used in this way counts as shared.

Never recomputed: random operations, operations that write, and functions of a hidden state. A hidden state
begins where entries of the batch meet a parameter in an operation that is not pointwise: an embedding, a
linear layer, a convolution.

The result depends only on the graph (on counted work, not measured), so every worker finds the same.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..torch_private.operators import OpOverload, is_random
from ..tracing.functional import nodes_in_writing, written
from ..tracing.nodes import tensors_of
from ..tracing.trace import TracedModel
from .flops import compute_nodes, work_per_node

# An accelerator of 10 TFlop/s behind 10 Gbit/s does 8,000 operations in the time of one byte, a core behind
# 1 Gbit/s 400.
_WORK_PER_SENT_BYTE = 1000.0
_MESSAGE_BYTES = 1 << 16  # the fixed cost of a message, as bytes: some 50 µs of latency
_LARGEST_SHARE = 1 / 16  # of the whole model's work; a section seldom has less
# Sharing a parameter adds its gradient to a sum once a step; a value is sent for every micro-batch, of which
# a step has at least about this many.
_HELD_PER_SENT_BYTE = 16

_aten = torch.ops.aten
# Pointwise operations that torch 2.13 does not tag as such.
_POINTWISE = {
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
    _aten.where.Scalar,
    _aten.__and__.Tensor,
    _aten.__or__.Tensor,
    _aten.__xor__.Tensor,
    _aten.contiguous.default,
    _aten.to.dtype,
    _aten.to.device,
    _aten.to.dtype_layout,
}


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a value is computed from."""

    nodes: frozenset[fx.Node] = frozenset()  # the operations that make it, itself included
    held: frozenset[str] = frozenset()  # parameters, buffers and constants
    batch: bool = False
    parameters: bool = False

    @property
    def mixed(self) -> bool:
        return self.batch and self.parameters


def find_derived(traced: TracedModel) -> frozenset[fx.Node]:
    """The nodes of `traced.graph` that each section computes for itself; closed under inputs."""
    nodes = compute_nodes(traced.graph)
    work = dict(zip(nodes, work_per_node(nodes, traced.precision), strict=True))
    limit = _LARGEST_SHARE * sum(work.values())
    barred = {update.node for update in traced.updates.values()} | nodes_in_writing(nodes)
    origins = _sources(traced)
    for node in nodes:
        if node.op == "get_attr":
            origins[node] = _Origin()
            continue
        if any(used not in origins for used in node.all_input_nodes):
            continue
        if node in barred or not is_pure(node):
            continue
        used = [origins[source] for source in node.all_input_nodes]
        origin = _join(used, node)
        if _keeps_apart(node, origin, used) and _is_cheap(node, origin, work, limit, traced.tensors):
            origins[node] = origin
    return frozenset(node for node in nodes if node in origins)


def _sources(traced: TracedModel) -> dict[fx.Node, _Origin]:
    lifted = {**traced.buffers, **traced.constants}
    found: dict[fx.Node, _Origin] = {}
    for place in traced.graph.find_nodes(op="placeholder"):
        if place.name in traced.inputs:
            found[place] = _Origin(batch=True)
        elif place.name in traced.parameters:
            name = traced.parameters[place.name]
            found[place] = _Origin(held=frozenset({name}), parameters=True)
        elif place.name in lifted and lifted[place.name] not in traced.updates:
            found[place] = _Origin(held=frozenset({lifted[place.name]}))
    return found


def _join(used: Sequence[_Origin], node: fx.Node) -> _Origin:
    return _Origin(
        nodes=frozenset[fx.Node]().union({node}, *(origin.nodes for origin in used)),
        held=frozenset[str]().union(*(origin.held for origin in used)),
        batch=any(origin.batch for origin in used),
        parameters=any(origin.parameters for origin in used),
    )


def is_pure(node: fx.Node) -> bool:
    """Whether `node` is deterministic and has no side effects."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    random = is_random(node.target, node.args, node.kwargs)
    return node.target.namespace in ("aten", "prims") and not random and not written(node)


def _keeps_apart(node: fx.Node, origin: _Origin, used: Sequence[_Origin]) -> bool:
    """Whether `node` makes no hidden state: batch and parameters meet only in pointwise operations."""
    if not origin.mixed:
        return True
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    if len(used) == 1 and node.target.is_view:
        return True
    return torch.Tag.pointwise in node.target.tags or node.target in _POINTWISE


def _is_cheap(
    node: fx.Node,
    origin: _Origin,
    work: Mapping[fx.Node, float],
    limit: float,
    tensors: Mapping[str, Tensor],
) -> bool:
    """Whether recomputing the value costs less than sending it, and is a small part of the model's work."""
    sent = sum(value.nbytes for value in tensors_of([node]))
    held = sum(tensors[name].nbytes for name in origin.held)
    if held > _HELD_PER_SENT_BYTE * (sent if origin.parameters else max(sent, _MESSAGE_BYTES)):
        return False
    made = sum(work[used] for used in origin.nodes)
    return made <= limit and made <= _WORK_PER_SENT_BYTE * (sent + _MESSAGE_BYTES)
