"""What a dry run would need of this machine, from shapes alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..cutting.partition import Sections
from ..cutting.work import compute_nodes, work_per_node
from ..memory_watch import available_bytes
from ..tracing.trace import TracedModel

_COPIES = (
    12  # of the parameters; measured with AdamW: 11 (weights, gradients, sums, two states, on each side)
)
_SECTION_COPIES = 7  # of a section's that runs alone, measured: 6
_ACTIVATIONS = 4  # micro-batches' worth: one on each side, and two for the loss of both together
_FORWARDS = 13  # two on each side, each with a backward (twice the work); the loss takes little
_SUSTAINED = 0.5  # part of the speed of a large product of matrices that a step reaches
PART_OF_MEMORY = 0.7
"""Of the free memory: what a check may take. The rest is the interpreter's, the data set's, and others'."""
_PROBE = 512  # rows of the matrices by which the speed is measured: 2·512³ operations, a few milliseconds


class Memory:
    """What may be taken of this machine's free memory, or of what its cgroup leaves of it."""

    def __init__(self, free_bytes: int | None = None) -> None:
        """`free_bytes`: None asks the machine, each time."""
        self._free_bytes = free_bytes

    def refusal(self, needs: Needs) -> str | None:
        """Why not to run here, or None."""
        free = available_bytes() if self._free_bytes is None else self._free_bytes
        if needs.memory_bytes <= PART_OF_MEMORY * free:
            return None
        return (
            f"it would need about {_in_words(needs.memory_bytes)} of memory; {_in_words(free)} are free, "
            f"of which {PART_OF_MEMORY:.0%} may be used. `makara check` does it where "
            f"{_in_words(needs.memory_bytes / PART_OF_MEMORY)} are free"
        )


@dataclass(frozen=True, slots=True)
class Needs:
    memory_bytes: int
    seconds: float = 0.0

    def too_long(self, max_seconds: float | None) -> str | None:
        """Why not to wait for it, or None."""
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
    seconds = _FORWARDS * sum(work_per_node(nodes)) / _operations_per_s()
    return Needs(_COPIES * parameters + _ACTIVATIONS * _activations(nodes), seconds)


def section_needs(chain: Sections, index: int) -> Needs:
    """Of one section by itself: forward, backward and update."""
    tensors = chain.traced.tensors
    parameters = sum(_bytes(tensors[name]) for name in chain.sections[index].parameters)
    activations = _activations(chain.modules[index].graph.nodes)
    return Needs(_SECTION_COPIES * parameters + _ACTIVATIONS * activations)


def _activations(nodes: Iterable[fx.Node]) -> int:
    return sum(
        _bytes(value)
        for node in nodes
        if node.op == "call_function"
        and isinstance(value := node.meta.get("val"), Tensor)
        and not _is_view(node.target)
    )


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


def _in_words(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"
