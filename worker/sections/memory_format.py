"""Where and in what form tensors lie: on a section's device, contiguous and aligned, with its seed set.

Kernels may sum in another order for another memory form, so a value must look the same here as after a
journey.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx

from ...model.tracing.regions import set_device

_ALIGNMENT = (
    64  # bytes: what torch's CPU allocator gives; vector kernels may sum otherwise on other alignments
)


def on_device(original: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The graph with the device that tracing wrote into it (`cpu`) replaced."""
    if device.type == "cpu":
        return original
    copied = copy.deepcopy(original)
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
    """Contiguous, aligned, in memory of its own form: the same here as after a journey."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
