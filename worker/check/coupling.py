"""Whether the samples of a micro-batch depend on each other, in the loss or in forward.

Contrastive losses, in-batch negatives and a balance of experts' load do: their loss of a whole batch is not
the sum of its micro-batches' losses, so the micro-batch size is part of the objective. If the job leaves that
size open, speed would choose the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.data import Sample, copied
from ...model.torch_private.pytree import tree_leaves, tree_map, tree_unflatten
from ...model.tracing.nodes import value_of
from ...model.tracing.trace import TracedModel
from ...model.training import Loss, sum_and_weight
from .findings import Report
from .random_numbers import FixedNumbers

LOSS, FORWARD = "Training.loss", "the model's forward"
BLAMED = {True: LOSS, False: FORWARD, None: f"{LOSS} or {FORWARD}"}
"""Where the coupling is, by the answer of `loss_couples`."""
_TIED = 1e-3  # of the gradient's norm; batches of another size run other kernels and differ by up to 1e-4

Result = tuple[Any, Sample]  # what forward returned for a micro-batch


def judge_coupling(report: Report, m: int, stated: bool, global_batch_size: int | None) -> None:
    """Refuse a model whose samples depend on each other (`report.batch_coupled`) where the job leaves the
    micro-batch size open; where it states the size, note it."""
    if report.batch_coupled is None:
        return
    said = (
        "no weighted mean of the losses of two micro-batches is their loss together, so the micro-batch size "
        "is part of what is trained: samples depend on each other, or the loss adds means over different "
        "counts"
    )
    if stated or m == global_batch_size:
        report.notes.append(f"{report.batch_coupled}: {said}. The size is {m} here")
        return
    whole = "" if global_batch_size is None else f" ({global_batch_size})"
    report.find(
        report.batch_coupled,
        f"{said}. parallelism.microbatch_size is left open: speed would choose it",
        "State parallelism.microbatch_size in the job file (`makara check --microbatch-size`); the value of "
        f"training.global_batch_size{whole} trains the loss over the whole batch. If the loss adds means "
        "over different counts, divide each term by the number of samples, or return (sum, weight)",
    )


def loss_couples(loss: Callable[[Any, dict[str, Tensor]], Loss], results: Sequence[Result]) -> bool | None:
    """Whether the loss of all `results` together has another gradient, up to a factor for each of them, than
    their own losses. None where that is not known: they do not join, or the loss refuses them."""
    try:
        parts = [(tree_map(_leaf, output), batch) for output, batch in results]
        joined = _joined([output for output, _ in parts])
        together = {name: torch.cat([batch[name] for _, batch in parts]) for name in parts[0][1]}
        with FixedNumbers(expected=True):
            whole = _gradients(loss, joined, together, [output for output, _ in parts])
            own = [_gradients(loss, output, copied(batch), [output])[0] for output, batch in parts]
    except Exception:  # the outputs may be made up: what the loss says of them is no fault of the user's
        return None
    size = float(torch.cat(whole).norm())
    left = [float((all_ - one * _factor(all_, one)).norm()) for all_, one in zip(whole, own, strict=True)]
    return max(left) > _TIED * size


def made_up_outputs(traced: TracedModel, count: int) -> list[Any]:
    """As many outputs of the traced shapes, with numbers between 0 and 1, which a loss takes for logits as
    well as for probabilities."""
    numbers = torch.Generator().manual_seed(0)

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return torch.zeros(value.shape, dtype=value.dtype)
        return (0.05 + 0.9 * torch.rand(value.shape, generator=numbers)).to(value.dtype)

    nodes: Any = traced.graph.output_node().args[0]
    values = [value_of(node) if isinstance(node, torch.fx.Node) else node for node in nodes]
    return [tree_unflatten([made(value) for value in values], traced.out_spec) for _ in range(count)]


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _joined(outputs: Sequence[Any]) -> Any:
    """The outputs' tensors one after another; the mean of those without dimensions."""

    def join(*values: Any) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        return torch.cat(values) if values[0].ndim else torch.stack(values).mean(0)

    return tree_map(join, *outputs)


def _gradients(
    loss: Callable[[Any, dict[str, Tensor]], Loss],
    output: Any,
    batch: dict[str, Tensor],
    parts: Sequence[Any],
) -> list[Tensor]:
    """The gradient of the mean loss by each part's tensors, in float64."""
    total, weight = sum_and_weight(loss(output, batch))
    wanted = [[x for x in tree_leaves(part) if isinstance(x, Tensor) and x.requires_grad] for part in parts]
    flat = [x for leaves in wanted for x in leaves]
    found = iter(torch.autograd.grad(total / weight, flat, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(found).flatten().double() for _ in leaves]) for leaves in wanted]


def _factor(whole: Tensor, one: Tensor) -> float:
    square = float(one @ one)
    return float(whole @ one) / square if square else 0.0
