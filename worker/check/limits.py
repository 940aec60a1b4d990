"""What a dry run would need of this machine, from shapes alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...model.partition.flops import compute_nodes, work_per_node
from ...model.partition.partition import Sections
from ..memory_watch import available_bytes
from .allocations import allocations

_COPIES = (
    12  # of the parameters; measured with AdamW: 11 (weights, gradients, sums, two states, on each side)
)
_CHANGED_COPIES = 16  # of buffers that forward changes, measured: 10, and 15 where rounding is looked at
_UNCHANGED_COPIES = 12  # of other buffers and of constants, measured: 6 and 11
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


class Sizes:
    """What the dry run of a model needs, whole and section by section."""

    def __init__(self, chain: Sections) -> None:
        self._chain = chain
        self._made = allocations(chain.traced)

    def whole(self) -> Needs:
        """Of both steps, with micro-batches of the traced size, two of them."""
        traced = self._chain.traced
        seconds = _FORWARDS * sum(work_per_node(compute_nodes(traced.graph))) / _operations_per_s()
        parameters = self._bytes_of(traced.parameter_names)
        return Needs(
            _COPIES * parameters + self._others(traced.tensors) + _ACTIVATIONS * sum(self._made.values()),
            seconds,
        )

    def section(self, index: int) -> Needs:
        """Of one section by itself: forward, backward and update."""
        section, nodes = self._chain.sections[index], self._chain.modules[index].graph.nodes
        held = self._others([*section.buffers, *section.constants])
        made = sum(self._made.get(node.name, 0) for node in nodes)
        return Needs(_SECTION_COPIES * self._bytes_of(section.parameters) + held + _ACTIVATIONS * made)

    def _others(self, names: Iterable[str]) -> int:
        """Of the buffers and constants among `names`."""
        traced = self._chain.traced
        others = [name for name in names if name not in self._parameters]
        changed = [name for name in others if name in traced.updates]
        unchanged = [name for name in others if name not in traced.updates]
        return _CHANGED_COPIES * self._bytes_of(changed) + _UNCHANGED_COPIES * self._bytes_of(unchanged)

    def _bytes_of(self, names: Iterable[str]) -> int:
        return sum(_bytes(self._chain.traced.tensors[name]) for name in names)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(self._chain.traced.parameter_names)


def _operations_per_s() -> float:
    one, other = torch.ones(_PROBE, _PROBE), torch.ones(_PROBE, _PROBE)
    torch.mm(one, other)  # starts the threads
    began = time.perf_counter()
    torch.mm(one, other)
    return _SUSTAINED * 2 * _PROBE**3 / (time.perf_counter() - began)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_words(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"
