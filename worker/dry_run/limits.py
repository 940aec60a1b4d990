"""What a dry run would need of this machine, from shapes alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch._ops import OpOverload

from ..cutting.work import compute_nodes, work_per_node
from ..tracing.trace import TracedModel

_COPIES = 8  # of the parameters: weights, gradients and two optimizer states, on both sides
_ACTIVATIONS = 4  # micro-batches' worth: one on each side, and two for the loss of both together
_FORWARDS = 13  # two on each side, each with a backward (twice the work); the loss takes little
_SUSTAINED = 0.5  # part of the speed of a large product of matrices that a step reaches
_PART_OF_MEMORY = 0.7
_PROBE = 512  # rows of the matrices by which the speed is measured: 2·512³ operations, a few milliseconds


@dataclass(frozen=True, slots=True)
class Needs:
    memory_bytes: int
    seconds: float

    def refusal(self, max_seconds: float | None) -> str | None:
        """Why not to run here, or None."""
        free = psutil.virtual_memory().available
        if self.memory_bytes > _PART_OF_MEMORY * free:
            return (
                f"it would need about {self.memory_bytes / 2**30:.1f} GiB of memory, and "
                f"{free / 2**30:.1f} GiB are free"
            )
        if max_seconds is not None and self.seconds > max_seconds:
            return (
                f"it would take about {self.seconds:.0f} s on this machine; `makara check` takes as long as "
                "it needs"
            )
        return None


def needs(traced: TracedModel) -> Needs:
    """Of the whole dry run with micro-batches of the traced size, two of them."""
    nodes = compute_nodes(traced.graph)
    parameters = sum(_bytes(traced.tensors[name]) for name in traced.parameter_names)
    activations = sum(
        _bytes(value)
        for node in nodes
        if isinstance(value := node.meta.get("val"), Tensor) and not _is_view(node.target)
    )
    seconds = _FORWARDS * sum(work_per_node(nodes)) / _operations_per_s()
    return Needs(_COPIES * parameters + _ACTIVATIONS * activations, seconds)


def _operations_per_s() -> float:
    one, other = torch.ones(_PROBE, _PROBE), torch.ones(_PROBE, _PROBE)
    torch.mm(one, other)  # starts the threads
    began = time.perf_counter()
    torch.mm(one, other)
    return _SUSTAINED * 2 * _PROBE**3 / (time.perf_counter() - began)


def _is_view(target: object) -> bool:
    return isinstance(target, OpOverload) and target.is_view


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
