"""Canonical placement of tensors: on a section's device, contiguous and aligned.

Kernels may sum in a different order for a different memory layout, so a tensor must have the same layout
whether it was computed here or received.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx

from ...model.tracing.regions import set_device

# In bytes, as torch's CPU allocator gives; vector kernels may sum differently on other alignments.
_ALIGNMENT = 64


def on_device(original: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of the graph with the traced device (`cpu`) replaced by `device`."""
    if device.type == "cpu":
        return original
    copied = copy.deepcopy(original).to(device)  # tensors that branches of torch.cond hold
    for module in copied.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                set_device(node, device)
            module.recompile()
    return copied


def seed_device(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def canonical(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, aligned and with its own numbers in memory, as if it had been received."""
    return aligned(tensor.resolve_conj().resolve_neg().contiguous())


def aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
