"""Norms whose backward torch gets wrong on the CPU, by what it reads of memory. Checked with torch 2.13.

**Batch norms** return wrong gradients without an error. A dimension of size 1 may have any stride, so views
give one such tensor several strides. For these `native_batch_norm_backward` takes the input and the gradient
as laid out alike when one is contiguous and the other channels-last: for a single sample, or a height or
width of 1. Which strides a gradient gets depends on what follows, so a cut behind a batch norm would change
the result. `instance_norm` calls the same kernel on one sample.

**Group norms** end the process by a signal. `native_group_norm_backward` reads the gradient of its input when
the input is channels-last, even if it was not asked for and does not exist: where the input has no gradient,
behind frozen layers or the data, and where gradients of parameters are computed apart from those of inputs.

Other normalisations, convolutions, pooling and resampling read such memory right, and heed what they are
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_INSTANCE_NORM = _aten.instance_norm
_BATCH_NORMS = frozenset({_aten.batch_norm, _aten.native_batch_norm, _aten._native_batch_norm_legit})
_GROUP_NORMS = frozenset({_aten.group_norm, _aten.native_group_norm})
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def settle_batch_norms(graph: fx.Graph) -> None:
    """Give every batch norm of a section's `graph` an input and a gradient with unambiguous strides."""
    for node in list(graph.nodes):
        kind = getattr(node.target, "overloadpacket", None)
        if kind is not _INSTANCE_NORM and kind not in _BATCH_NORMS:
            continue
        with graph.inserting_before(node):
            node.args = (graph.call_function(with_plain_strides, (node.args[0],)), *node.args[1:])
        with graph.inserting_after(node):
            hooked = graph.call_function(
                _contiguous_gradient if kind is _INSTANCE_NORM else _gradient_with_plain_strides, (node,)
            )
        hooked.meta = dict(node.meta)
        for user in list(node.users):
            if user is not hooked:
                user.replace_input_with(node, hooked)


def with_plain_strides(tensor: Tensor) -> Tensor:
    """`tensor`, copied if it is channels-last with strides that do not tell so."""
    form = _CHANNELS_LAST.get(tensor.ndim)
    if form is None or 1 not in tensor.shape or tensor.is_contiguous():
        return tensor
    if not tensor.is_contiguous(memory_format=form):
        return tensor
    plain = torch.empty(tensor.shape, memory_format=form, device="meta").stride()
    return tensor if tensor.stride() == plain else tensor.clone(memory_format=form)


def _gradient_with_plain_strides(result: Any) -> Any:
    return _hooked(result, with_plain_strides)


def _contiguous_gradient(result: Any) -> Any:
    # It is viewed with its samples as channels before the kernel sees it, which makes strides ambiguous.
    return _hooked(result, Tensor.contiguous)


def _hooked(result: Any, hook: Callable[[Tensor], Tensor]) -> Any:
    normed: Tensor = result[0] if isinstance(result, tuple) else result
    if normed.requires_grad:
        normed.register_hook(hook)
    return result


def settle_group_norms(graph: fx.Graph) -> None:
    """Give every group norm of a section's `graph` an input that is not channels-last, and its result the
    layout that it would have had."""
    for node in list(graph.nodes):
        if getattr(node.target, "overloadpacket", None) not in _GROUP_NORMS:
            continue
        given = node.args[0]
        with graph.inserting_before(node):
            node.args = (graph.call_function(_not_channels_last, (given,)), *node.args[1:])
        with graph.inserting_after(node):
            restored = graph.call_function(_in_layout_of, (given, node))
        restored.meta = dict(node.meta)
        for user in list(node.users):
            if user is not restored:
                user.replace_input_with(node, restored)


def _not_channels_last(tensor: Tensor) -> Tensor:
    return tensor if _channels_last(tensor) is None else tensor.contiguous()


def _in_layout_of(given: Tensor, result: Any) -> Any:
    form = _channels_last(given)
    if form is None:
        return result
    if isinstance(result, tuple):
        return result[0].contiguous(memory_format=form), *result[1:]
    return result.contiguous(memory_format=form)


def _channels_last(tensor: Tensor) -> torch.memory_format | None:
    """The format that torch would compute in, if it is channels-last and on the CPU."""
    form = _CHANNELS_LAST.get(tensor.ndim)
    if form is None or tensor.device.type != "cpu" or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    dense = torch.empty_like(tensor, device="meta")  # without the gaps that a slice has
    return form if dense.is_contiguous(memory_format=form) and not dense.is_contiguous() else None
