"""The memory and time that a dry run would need on this machine, from shapes alone.

The graph is run on fake tensors, which take the way that real ones take, and all results that have memory of
their own are counted, inside composite operators too: attention with dropout holds its scores several times
over, an LSTM its gates at every step.

Runs operations on fake tensors: checked with torch 2.13.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ...model.partition.flops import compute_nodes, work_per_node
from ...model.partition.partition import Sections
from ...model.torch_private.higher_order import FunctionsSeen
from ...model.torch_private.pytree import tree_leaves
from ...model.torch_private.storages import storage_key
from ...model.tracing.nodes import empty_like, value_of
from ...model.tracing.trace import TracedModel
from ...protocol.sizes import in_words
from ..memory_watch import available_bytes
from .interpreter import GraphInterpreter

_COPIES = 12  # of parameters; measured with AdamW: 11 (weights, gradients, sums, two states, on each side)
_SECTION_COPIES = 7  # of a section's that runs alone, measured: 6
_OTHER_COPIES = 16  # of buffers and constants, measured: 15 of a buffer that forward changes, 11 of others
_ACTIVATIONS = 4  # micro-batches' worth: one on each side, and two for the loss of both together
_FORWARDS = 17  # two on each side, each with a backward (twice the work), and four for the loss
_TWO_PASSES = 6  # two forwards, each with a backward
_SUSTAINED = 0.5  # part of the speed of a large product of matrices that a step reaches
_PROBE = 512  # rows of the matrices by which the speed is measured: 2·512³ operations, a few milliseconds
# Of the free memory: what a check may take. The rest is the interpreter's, the data set's, and others'.
_PART_OF_MEMORY = 0.7


def refusal(needed_bytes: int, free_bytes: int | None) -> str | None:
    """Why not to run here, or None. `free_bytes`: of memory; None: as the machine and its cgroup say now."""
    free = available_bytes() if free_bytes is None else free_bytes
    if needed_bytes <= _PART_OF_MEMORY * free:
        return None
    return (
        f"it would need about {in_words(needed_bytes)} of memory; {in_words(free)} are free, of which "
        f"{_PART_OF_MEMORY:.0%} may be used. `makara check` does it where "
        f"{in_words(needed_bytes / _PART_OF_MEMORY)} are free"
    )


class Needs:
    """The needs of a model's dry run, whole and section by section."""

    def __init__(self, chain: Sections) -> None:
        self._chain = chain
        self._tensors = chain.traced.tensors
        self._parameters = frozenset(chain.traced.parameter_names)

    def whole_bytes(self) -> int:
        """Of both steps, with micro-batches of the traced size, two of them."""
        return self._bytes(_COPIES, self._tensors, self._made.values())

    def section_bytes(self, index: int) -> int:
        """Of one section by itself: forward, backward and update."""
        section, nodes = self._chain.sections[index], self._chain.modules[index].graph.nodes
        names = (*section.parameters, *section.buffers, *section.constants)
        return self._bytes(_SECTION_COPIES, names, (self._made.get(node.name, 0) for node in nodes))

    def seconds(self) -> float:
        """Of both steps on this machine."""
        traced = self._chain.traced
        return (
            _FORWARDS
            * sum(work_per_node(compute_nodes(traced.graph), traced.precision))
            / _operations_per_s()
        )

    def joined_seconds(self) -> float:
        """Of a forward and a backward in sections, and of the same with sections joined."""
        return self.seconds() * _TWO_PASSES / _FORWARDS

    def _bytes(self, copies: int, names: Iterable[str], made: Iterable[int]) -> int:
        held = sum(
            (copies if name in self._parameters else _OTHER_COPIES) * self._tensors[name].nbytes
            for name in names
        )
        return held + _ACTIVATIONS * sum(made)

    @cached_property
    def _made(self) -> dict[str, int]:
        return allocations(self._chain.traced)


def allocations(traced: TracedModel) -> dict[str, int]:
    """Bytes that a forward with autograd makes, by the name of the graph's node. An upper bound for what is
    kept for the backward: what a composite operator needs for a moment only is counted as well."""
    made: dict[str, int] = {}
    places = traced.graph.find_nodes(op="placeholder")
    with traced.recording.fake_mode, _without_onednn():
        inputs = [_like(node, traced.parameters.get(node.name) in traced.trainable) for node in places]
        with _NewMemory(inputs) as counter:

            def count(node: fx.Node, _: Any) -> None:
                made[node.name], counter.size_bytes = counter.size_bytes, 0

            GraphInterpreter(traced, count).run(*inputs)
    return made


class _NewMemory(FunctionsSeen):
    """Adds up the memory of all results that is not the memory of an earlier one."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self._known = {
            storage_key(value): value for value in given if isinstance(value, Tensor)
        }  # alive, so that no place gets free
        self.size_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = self.run(func, args, kwargs or {})
        for value in tree_leaves(returned):
            if isinstance(value, Tensor) and (place := storage_key(value)) not in self._known:
                self._known[place] = value
                self.size_bytes += value.untyped_storage().nbytes()
        return returned


@contextmanager
def _without_onednn() -> Generator[None]:
    """oneDNN's recurrent layers do not say how large their workspace is; step by step, they take more."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _like(node: fx.Node, trained: bool) -> Any:
    value = value_of(node)
    return empty_like(value).requires_grad_(trained) if isinstance(value, Tensor) else value


def _operations_per_s() -> float:
    one, other = torch.ones(_PROBE, _PROBE), torch.ones(_PROBE, _PROBE)
    torch.mm(one, other)  # starts the threads
    began = time.perf_counter()
    torch.mm(one, other)
    return _SUSTAINED * 2 * _PROBE**3 / (time.perf_counter() - began)
