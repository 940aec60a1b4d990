"""Where a traced graph and the user's module part: the first module whose output the graph does not give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ...model.data import Sample
from ...model.tracing.trace import TracedModel
from .eager import EagerModel
from .findings import difference
from .random_numbers import FixedNumbers

_FAR = 1e-4  # beyond rounding, also where outputs are small differences


@dataclass(frozen=True, slots=True)
class Place:
    """A module of the user's model. `line`: file:line of its forward."""

    path: str
    kind: str
    line: str

    def __str__(self) -> str:
        return f"{self.path or 'the whole model'} ({self.kind}, {self.line})"


def first_difference(
    eager: EagerModel, traced: TracedModel, weights: Mapping[str, Tensor], calls: list[Sample]
) -> Place | None:
    """The first module, in the order in which they finish, whose output in the last of `calls` is that of no
    operation which the graph has for it. None when no module can be blamed.

    `weights`: parameters and buffers by name. Memory: all activations of one micro-batch, twice.
    """
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
    values = _graph_values(traced, weights, calls[-1])
    for path, output in outputs:
        candidates = values.get(path, [])
        if candidates and all(difference(output, value) > _FAR for value in candidates):
            return _place(eager.module.get_submodule(path), path)
    return None


def backward_hooks(model: nn.Module) -> list[str]:
    """Modules and parameters with hooks that act on gradients."""
    kept = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    owners: list[tuple[str, nn.Module | nn.Parameter]] = [*model.named_modules(), *model.named_parameters()]
    return [name for name, owner in owners if any(getattr(owner, hooks, None) for hooks in kept)]


def _graph_values(
    traced: TracedModel, weights: Mapping[str, Tensor], batch: Sample
) -> dict[str, list[Tensor]]:
    """Module path -> the values that operations within it make."""
    known = {**traced.parameters, **traced.buffers, **traced.constants}
    found: dict[str, list[Tensor]] = {}

    class Runner(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            stack: Mapping[str, tuple[str, Any]] = n.meta.get("nn_module_stack") or {}
            for path, _ in stack.values():
                found.setdefault(path, []).extend(_tensors(value))
            return value

    arguments = [
        _value(traced, weights, known[node.name]) if node.name in known else batch[traced.inputs[node.name]]
        for node in traced.graph.find_nodes(op="placeholder")
    ]
    with FixedNumbers(), torch.no_grad():
        Runner(fx.GraphModule(traced.owner, traced.graph)).run(*arguments)
    return found


def _value(traced: TracedModel, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return weights[name].detach() if name in weights else traced.initial(name)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place(part: nn.Module, path: str) -> Place:
    forward = inspect.unwrap(type(part).forward)
    file = inspect.getsourcefile(forward) or "?"
    return Place(path, type(part).__name__, f"{file}:{forward.__code__.co_firstlineno}")
