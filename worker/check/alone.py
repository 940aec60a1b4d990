"""Sections run by themselves, one in memory at a time: what tracing does not touch runs at its real size,
also where a whole step does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...model.data import Sample
from ...model.partition.partition import Sections
from ...model.training import Loss, Training
from ..sections.ranges import RangeRuntime
from .limits import Memory, Sizes


class NotTrained(ValueError):
    """The loss leads back to no parameter of the model, or to others as well."""


def run_last(
    chain: Sections, training: Training, seed: int, batch: Sample, memory: Memory, sizes: Sizes
) -> str | None:
    """The last section on zeros: the loss, its gradient, and the optimizer's update. Returns why it was left
    out, or None. Raises the user's errors."""
    last = chain.num_sections - 1
    refusal = memory.refusal(sizes.section(last))
    if refusal is None:
        zeros = {
            value.name: torch.zeros(value.shape, dtype=value.torch_dtype) for value in chain.inputs_of(last)
        }
        _run(chain, training, seed, last, zeros, batch)
    return refusal


def run_each(
    chain: Sections, training: Training, seed: int, batch: Sample, memory: Memory, sizes: Sizes
) -> list[str]:
    """All but the last, each on what the one before gives: forward, backward of zeros, update. Returns
    what was run, in words. Raises the user's errors."""
    values: Mapping[str, Tensor] = {}
    last = chain.num_sections - 1
    for index in range(last):
        refusal = memory.refusal(sizes.section(index))
        if refusal is not None:
            begun = f"of {chain.num_sections} sections the first {index} were run one by one"
            return [f"{begun}; section {index}: {refusal}"]
        values = _run(chain, training, seed, index, values, batch)
    return [f"the first {last} of {chain.num_sections} sections were run one by one"] if last else []


def _run(
    chain: Sections, training: Training, seed: int, index: int, values: Mapping[str, Tensor], batch: Sample
) -> dict[str, Tensor]:
    runtime = RangeRuntime(chain, replace(training, loss=partial(_loss, training)), seed)
    section = runtime.host(index)
    gradients = {name: torch.zeros_like(parameter) for name, parameter in section.trainable.items()}

    def keep(_section: int, name: str, gradient: Tensor) -> None:
        gradients[name] = gradient

    output = runtime.forward(0, 0, index, index + 1, values, batch, keep=True)
    outside = chain.outputs_of(index + 1)
    seeds = {value.name: torch.zeros_like(output.values[value.name]) for value in outside if value.needs_grad}
    runtime.backward(0, index, seeds, keep)
    section.apply(0, gradients)
    return output.values


def _loss(training: Training, output: Any, batch: dict[str, Tensor]) -> Loss:
    """The user's loss, which must lead back to the model: otherwise the job would run and train nothing."""
    loss: Any = training.loss(output, batch)
    total = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(total, Tensor):
        return loss
    if not total.requires_grad:
        raise NotTrained(
            "no gradient flows from it into the model; expected a differentiable function of the model's "
            "output, without detach(), no_grad() or a new tensor"
        )
    if foreign := _leaves_outside(total, output):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in foreign[:3])
        raise NotTrained(
            f"a gradient flows into parameters that are not the model's (of shape {shapes}): no optimizer "
            "would update them, and each VM would have values of its own. Make them parameters of the model, "
            "and let forward return what the loss needs of them"
        )
    return loss


def _leaves_outside(total: Tensor, output: Any) -> list[Tensor]:
    """The leaves that require a gradient between the model's output and the loss."""
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None, *(leaf.grad_fn for leaf in ends)}
    found: list[Tensor] = []
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not end for end in ends):
            found.append(leaf)
        waiting += [after for after, _ in node.next_functions]
    return found
