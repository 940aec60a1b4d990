"""Data types of the partition: tensors that cross cuts, one section's inputs and outputs, the chain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch
from torch import fx

from ..tracing.trace import TracedModel
from .flops import compute_nodes, work_per_node
from .places import spans


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A tensor that crosses a cut."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32"
    needs_grad: bool
    order: tuple[int, ...] | None = None  # `memory_order` in the trace; it is sent contiguous

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True)
class Section:
    """Inputs and outputs of section `index`; all names in a fixed order."""

    index: int
    parameters: tuple[str, ...]  # canonical names, in the model's order
    trainable: tuple[str, ...]  # those of them that the optimizer updates
    buffers: tuple[str, ...]  # persistent and not
    constants: tuple[str, ...]
    batch: tuple[str, ...]  # entries of the batch that its graph takes; the last section's loss takes all
    inputs: tuple[str, ...]  # values from earlier sections that it uses
    outputs: tuple[str, ...]  # values that it makes and later sections use
    updates: tuple[str, ...] = ()  # buffers whose new values it returns after its outputs
    label: str = ""  # for people: its modules and the line where it begins


@dataclass(frozen=True)
class Sections:
    """The whole chain. `crossing[k]`: the values that cross from section k to k+1, including relayed ones."""

    sections: tuple[Section, ...]
    crossing: tuple[tuple[CutTensor, ...], ...]
    shared: dict[str, tuple[int, ...]]  # parameter used in several sections -> those sections, ascending
    parameter_names: tuple[str, ...]  # in the model's order: the order of the gradient norm
    trainable_names: tuple[str, ...]  # likewise, without frozen and unused ones
    persistent_buffers: frozenset[str]
    aliases: dict[str, str]  # further name of a tied tensor -> its canonical name
    cuts: tuple[int, ...]
    modules: tuple[fx.GraphModule, ...]
    traced: TracedModel

    @property
    def num_sections(self) -> int:
        return len(self.sections)

    def inputs_of(self, start: int) -> tuple[CutTensor, ...]:
        """The values that a range beginning at section `start` receives."""
        return self.crossing[start - 1] if start > 0 else ()

    def outputs_of(self, stop: int) -> tuple[CutTensor, ...]:
        """The values that a range ending before section `stop` sends on."""
        return self.crossing[stop - 1] if stop < self.num_sections else ()

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Counted forward work of each section in floating-point operations, at least 1."""
        counted = work_per_node(compute_nodes(self.traced.graph), self.traced.precision)
        return tuple(
            max(1, round(sum(counted[start:stop]))) for start, stop in spans(self.cuts, len(counted))
        )

    @property
    def frozen(self) -> int:
        """How many of the first sections get no gradient, because no parameter up to there is trained."""
        pairs = zip(self.sections, self.crossing, strict=False)
        is_frozen = (not s.trainable and not any(v.needs_grad for v in after) for s, after in pairs)
        return sum(1 for _ in takewhile(bool, is_frozen))

    @property
    def relayed(self) -> tuple[tuple[str, ...], ...]:
        """For each section, the values that cross both before and after it and that it does not output."""
        after = (*self.crossing, ())
        return tuple(
            tuple(value.name for value in values if value.name not in section.outputs)
            for section, values in zip(self.sections, after, strict=True)
        )

    @property
    def updated_buffers(self) -> tuple[str, ...]:
        """Buffers that training changes (running statistics, counters), in the model's order."""
        found = {name for section in self.sections for name in section.updates}
        return tuple(name for name in self.traced.tensors if name in found)
