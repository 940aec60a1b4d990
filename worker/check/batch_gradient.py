"""The gradient of two micro-batches' losses, apart and together: by the outputs that the model gave, which
costs the loss alone, or by parameters, which costs forwards.

Runs the module on fake tensors to see which dimension of its outputs is the batch's: checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...model.data import Sample
from ...model.tracing.guards import unvalidated_distributions
from ...model.training import Training, call_user_code
from .eager import EagerModel
from .random_numbers import FixedNumbers

_SAMPLED = 1 << 21  # elements of a gradient that are looked at: logits may have hundreds of millions

Heard = Sequence[tuple[Any, Sample]]


@dataclass(frozen=True, slots=True)
class Point:
    """Gradients, flat and float64, thinned out alike: of each micro-batch's mean loss, and of that of all
    together."""

    apart: list[Tensor]
    together: Tensor


def by_outputs(training: Training, eager: EagerModel, heard: Heard) -> Point | None:
    """With respect to the outputs; None where they are not samples beside each other (a loss that the model
    computes itself)."""
    flat = [tree_flatten(output) for output, _ in heard]
    rows = {value.shape[0] for value in heard[0][1].values()}
    if any(_is_tensor(leaf) and (leaf.dim() == 0 or leaf.shape[0] not in rows) for leaf in flat[0][0]):
        return None  # before the module is run
    batch = _joined([batch for _, batch in heard])
    if not _are_samples(flat[0][0], _outputs_of(eager, batch)):
        return None
    leaves = [[_leaf(leaf) for leaf in output] for output, _ in flat]
    spec = flat[0][1]
    joined = [
        torch.cat(cast(list[Tensor], parts)) if _is_tensor(parts[0]) else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    wanted = [leaf for output in leaves for leaf in output if _is_tensor(leaf) and leaf.requires_grad]

    def gradient(output: Sequence[Any], batch: Sample) -> Tensor:
        loss = call_user_code("Training.loss", training.loss, tree_unflatten(output, spec), dict(batch))
        return _gradient(loss, wanted)

    with FixedNumbers(expected=True):
        apart = [gradient(output, batch) for output, (_, batch) in zip(leaves, heard, strict=True)]
        return Point(apart, gradient(joined, batch))


def by_parameters(eager: EagerModel, heard: Heard, wanted: Sequence[str]) -> Point:
    """With respect to parameters. Dropout is left out, batch norm uses its running statistics, and every call
    begins with the same buffers, so that a sample's output is its own."""
    batches = [batch for _, batch in heard]
    buffers = {name: buffer.detach().clone() for name, buffer in eager.module.named_buffers()}
    with _judging(eager.module, wanted) as parameters, FixedNumbers(expected=True):

        def gradient(batch: Sample) -> Tensor:
            found = _gradient(eager.loss(eager.output(batch), batch), list(parameters.values()))
            eager.set_buffers(buffers)
            return found

        return Point([gradient(batch) for batch in batches], gradient(_joined(batches)))


def _outputs_of(eager: EagerModel, batch: Sample) -> list[Any]:
    """What the module returns for `batch`, without values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, unvalidated_distributions():
        return tree_leaves(eager.output({name: mode.from_tensor(value) for name, value in batch.items()}))


def _are_samples(outputs: Sequence[Any], twice: Sequence[Any]) -> bool:
    """Whether every tensor has twice as many rows for a batch twice as large."""
    return len(outputs) == len(twice) and all(
        not _is_tensor(one)
        or (
            one.dim() > 0
            and _is_tensor(other)
            and other.shape[:1] == (2 * one.shape[0],)
            and other.shape[1:] == one.shape[1:]
        )
        for one, other in zip(outputs, twice, strict=True)
    )


def _joined(batches: Sequence[Sample]) -> Sample:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _gradient(loss: Any, wanted: Sequence[Tensor]) -> Tensor:
    total, weight = cast(tuple[Any, Any], loss) if isinstance(loss, tuple) else (loss, 1.0)
    found = cast(Sequence[Tensor | None], torch.autograd.grad(total / weight, wanted, allow_unused=True))
    stride = 1 + sum(tensor.numel() for tensor in wanted) // _SAMPLED
    return torch.cat(
        [
            (torch.zeros_like(tensor) if gradient is None else gradient).flatten()[::stride].double()
            for tensor, gradient in zip(wanted, found, strict=True)
        ]
    )


def _leaf(leaf: Any) -> Any:
    differentiable = _is_tensor(leaf) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if differentiable else leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


class _judging:
    """Batch statistics switched off, and only the wanted parameters recording gradients."""

    def __init__(self, module: nn.Module, wanted: Sequence[str]) -> None:
        self._module = module
        self._wanted = set(wanted)
        self._recording: list[nn.Parameter] = []
        self._training: list[nn.Module] = []

    def __enter__(self) -> Mapping[str, nn.Parameter]:
        norms = (nn.modules.batchnorm._BatchNorm,)  # pyright: ignore[reportPrivateUsage]
        self._training = [
            part for part in self._module.modules() if isinstance(part, norms) and part.training
        ]
        for part in self._training:
            part.eval()
        named = dict(self._module.named_parameters())
        self._recording = [p for name, p in named.items() if p.requires_grad and name not in self._wanted]
        for parameter in self._recording:
            parameter.requires_grad_(False)
        return {name: parameter for name, parameter in named.items() if name in self._wanted}

    def __exit__(self, *_: object) -> None:
        for part in self._training:
            part.train()
        for parameter in self._recording:
            parameter.requires_grad_(True)
