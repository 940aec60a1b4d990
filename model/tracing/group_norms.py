"""Group norms whose backward would end the process on the CPU.

`native_group_norm_backward` reads the gradient of its input when the input is channels-last, even if it was
not asked for and does not exist: the process ends by a signal. It is not asked for where the input has no
gradient, behind frozen layers or the data, and where gradients of parameters are computed apart from those
of inputs. Other normalisations and convolutions heed what they are asked for. Checked with torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_GROUP_NORMS = frozenset({_aten.group_norm, _aten.native_group_norm})
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
    if form is None or tensor.device.type != "cpu" or 0 in tensor.stride():
        return None
    dense = torch.empty_like(tensor, device="meta")  # without the gaps that a slice has
    return form if dense.is_contiguous(memory_format=form) and not dense.is_contiguous() else None
