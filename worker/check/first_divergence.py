"""Where a traced graph and the user's module part: the first module whose output the graph does not give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...model.data import Sample
from ...model.torch_private.pytree import tree_leaves
from ...model.tracing.layouts import laid_out, memory_order
from ...model.tracing.trace import TracedModel
from .eager import EagerModel
from .findings import difference
from .interpreter import GraphInterpreter
from .random_numbers import FixedNumbers

_FAR = 1e-4  # beyond rounding, also where outputs are small differences


def first_divergence(
    eager: EagerModel, traced: TracedModel, weights: Mapping[str, Tensor], calls: Sequence[Sample]
) -> str | None:
    """The first module, in the order in which they finish, whose output in the last of `calls` is that of no
    operation which the graph has for it: its path, class and line. None when no module can be blamed.

    `weights`: parameters and buffers by name. Memory: all activations of one micro-batch, twice.
    """
    values = _graph_values(traced, weights, calls[-1])
    for path, output in _module_outputs(eager, calls):
        candidates = values.get(path, [])
        if candidates and all(difference(output, value) > _FAR for value in candidates):
            return _described(path, eager.module.get_submodule(path))
    return None


def _module_outputs(eager: EagerModel, calls: Sequence[Sample]) -> list[tuple[str, Tensor]]:
    outputs: list[tuple[str, Tensor]] = []

    def keep(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _part, _inputs, output: outputs.extend((path, value) for value in _tensors(output))

    hooks = [part.register_forward_hook(keep(path)) for path, part in eager.module.named_modules()]
    try:
        with FixedNumbers():
            for batch in calls:
                outputs.clear()
                eager.output(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _graph_values(
    traced: TracedModel, weights: Mapping[str, Tensor], batch: Sample
) -> dict[str, list[Tensor]]:
    """Module path -> the values that operations within it make."""
    known = {**traced.parameters, **traced.buffers, **traced.constants}
    found: dict[str, list[Tensor]] = {}

    def keep(node: fx.Node, value: Any) -> None:
        stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        for path, _ in stack.values():
            found.setdefault(path, []).extend(_tensors(value))

    def given(place: str) -> Tensor:
        if place not in known:
            return batch[traced.inputs[place]]
        name = known[place]
        if name in weights:
            return weights[name].detach()
        return laid_out(traced.initial(name), memory_order(traced.tensors[name]))

    arguments = [given(node.name) for node in traced.graph.find_nodes(op="placeholder")]
    with FixedNumbers(), torch.no_grad():
        GraphInterpreter(traced, keep).run(*arguments)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _described(path: str, part: nn.Module) -> str:
    forward = inspect.unwrap(type(part).forward)
    line = f"{inspect.getsourcefile(forward) or '?'}:{forward.__code__.co_firstlineno}"
    return f"{path or 'the whole model'} ({type(part).__name__}, {line})"
