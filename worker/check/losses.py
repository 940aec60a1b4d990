"""Whether the loss leads back to the model and to nothing else, whether it is a function of output and batch
alone, and whether the mean of the micro-batches' losses is the loss of the micro-batches together.

For samples that count alike, and for a declared (sum, weight), the gradient of two micro-batches together is
the weighted mean of theirs. Fitting the weights to the gradients tells a loss that weighs otherwise (a mean
over unequal numbers of targets) from one that couples samples (a balance of experts' load), which
has no weights that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.data import Sample, copied
from ...model.errors import UserCodeError
from ...model.torch_private.higher_order import run_as_python
from ...model.torch_private.modules import BatchNorm
from ...model.torch_private.pytree import tree_leaves, tree_map
from ...model.training import AS_A_WEIGHT, Loss, Training, refuse_metric, sum_and_weight
from .calls import Calls
from .coupling import BLAMED, loss_couples
from .eager import EagerModel
from .findings import Report, some
from .random_numbers import FixedNumbers

_FIELD = "Training.loss"
_DIFFERS = 1e-4  # of the gradient's norm: batches of another size run other kernels, so more than `TOLERANCE`
_FITS = 0.1  # weights explain a difference when this part of it, at most, is left
_SCALE = 0.02  # weights that fit add up to 1 by so much
_TIED = 1e-3  # what no weights explain and is more than rounding
_BITS = 2  # or than so many last bits of a type of few bits
_SAMPLED = 1 << 21  # elements of a gradient that are looked at: an output layer may have hundreds of millions


class NotTrained(ValueError):
    """The loss leads back to no parameter of the model, or to others as well."""


def checked_loss(training: Training) -> Training:
    """`training`, whose loss is refused where it leads back to no parameter of the model, or to others."""
    return replace(training, loss=partial(_loss, training))


class LossRecorder:
    """Stands in for `Training.loss` and notes what it does: it must depend on output and batch alone."""

    def __init__(self, loss: Callable[[Any, dict[str, Tensor]], Loss]) -> None:
        self._loss = loss
        self._calls = Calls()
        self._repeated: tuple[float, float] | None = None  # the first loss, and that of the same call again
        self.declares_weight = False
        self._returns_metric = False

    def __call__(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        with self._calls.watched():
            loss: Any = self._loss(output, copied(batch))
            if self._repeated is None:
                self._repeated = _value(loss), _value(self._loss(output, copied(batch)))
                self._returns_metric = isinstance(loss, tuple) and self._weighs_output(loss, output, batch)
        self.declares_weight = isinstance(loss, tuple)
        return cast(Loss, loss)

    def _weighs_output(self, loss: Any, output: Any, batch: dict[str, Tensor]) -> bool:
        """Whether other outputs, most of them in the range of these, have another weight."""
        weight = float(sum_and_weight(loss)[1])
        for change in (_halved, torch.neg, *(partial(_turned, places) for places in (1, 2, 4, 8))):
            changed = tree_map(partial(_where_trained, change), output)
            try:
                other = float(sum_and_weight(self._loss(changed, copied(batch)))[1])
            except Exception:  # the loss need not take any other output
                continue
            if other != weight:
                return True
        return False

    def blame(self, report: Report) -> None:
        self._calls.blame(_FIELD, report)
        if self._returns_metric:
            report.notes.append(
                f"{_FIELD}: its second value follows the model's output. If it is a metric: {AS_A_WEIGHT}"
            )
        once, again = self._repeated or (0.0, 0.0)
        if once != again and (once == once or again == again):  # not both no number
            report.find(
                _FIELD,
                f"it gives {once:.9g} and then {again:.9g} for the same output and batch: it keeps state, or "
                "changes the output in place. Micro-batches are computed on any machine, in any order",
                "Make it a function of the output and the batch alone",
            )


def check_weights(
    eager: EagerModel,
    batches: Sequence[Sample],
    declared: bool,
    wanted: Sequence[Tensor],
    report: Report,
) -> None:
    """Adds to `report` what is to be said of how micro-batches count. `declared`: by weights of the loss.

    `wanted`: the parameters whose gradients are compared; the nearer to the output, the cheaper.
    """
    numbers = FixedNumbers(expected=True)
    try:
        apart, together, weights = _gradients(eager, batches, wanted, numbers)
    except UserCodeError as error:
        reason = error.message.splitlines()[0]
        report.notes.append(
            f"whether micro-batches count alike is not known: a batch twice as large fails ({reason})"
        )
        return
    size = float(together.norm())
    if size == 0.0 or not bool(torch.isfinite(together).all()):
        return
    share = torch.tensor(weights, dtype=torch.float64) / (sum(weights) or 1.0)
    fitted = torch.linalg.lstsq(apart, together.unsqueeze(1), driver="gelsd").solution.flatten()
    differs, left = (float((together - apart @ by).norm()) / size for by in (share, fitted))
    if differs > _DIFFERS and left <= max(_DIFFERS, _FITS * differs):
        alike = declared and weights == [1.0, 1.0]  # (mean, 1): the user says that they count alike
        if not alike:
            _blame_weights(fitted.tolist(), share.tolist(), declared, report)
    elif left > max(_TIED, _BITS * max(torch.finfo(value.dtype).eps for value in wanted)):
        if numbers.drawn:
            report.notes.append(
                "whether the samples of a micro-batch depend on each other is not known: the model or its "
                f"loss draws by {some(numbers.drawn)}, and draws otherwise in a larger batch"
            )
            return
        results = [(_output(eager, batch), batch) for batch in batches]
        report.batch_coupled = BLAMED[loss_couples(eager.loss, results)]


def _gradients(
    eager: EagerModel, batches: Sequence[Sample], wanted: Sequence[Tensor], numbers: FixedNumbers
) -> tuple[Tensor, Tensor, list[float]]:
    """(a column for each micro-batch's mean loss, that of all together, the micro-batches' weights), where
    gradients are in float64 and thinned out alike.

    Dropout is left out, batch norm uses its running statistics, and every call begins with the same buffers,
    so that a sample's output is its own.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in eager.module.named_buffers()}
    stride = 1 + sum(parameter.numel() for parameter in wanted) // _SAMPLED

    def gradient(batch: Sample) -> tuple[Tensor, float]:
        loss = eager.loss(eager.output(batch), batch)
        total, weight = sum_and_weight(loss)
        weight = float(weight)
        mean = total / (weight or 1.0)
        found = torch.autograd.grad(mean, wanted, allow_unused=True, materialize_grads=True)
        eager.set_buffers(buffers)
        return torch.cat([value.flatten()[::stride].double() for value in found]), weight

    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    with _running_statistics(eager.module), numbers, run_as_python():
        apart = [gradient(batch) for batch in batches]
        together, _ = gradient(joined)
    return torch.stack([column for column, _ in apart], dim=1), together, [weight for _, weight in apart]


def _output(eager: EagerModel, batch: Sample) -> Any:
    with torch.no_grad(), _running_statistics(eager.module), FixedNumbers(expected=True):
        return eager.output(batch)


@contextmanager
def _running_statistics(module: nn.Module) -> Generator[None]:
    """Batch norms in evaluation mode."""
    training = [part for part in module.modules() if isinstance(part, BatchNorm) and part.training]
    for part in training:
        part.eval()
    try:
        yield
    finally:
        for part in training:
            part.train()


def _blame_weights(fitted: Sequence[float], share: Sequence[float], declared: bool, report: Report) -> None:
    total = sum(fitted)
    how = "it returns (sum, weight)" if declared else "it returns a mean"
    ratio = " : ".join(f"{weight:.4g}" for weight in fitted)
    said = " : ".join(f"{weight:.4g}" for weight in share)
    if abs(total - 1.0) > _SCALE:
        report.find(
            _FIELD,
            f"{how}, but two micro-batches together give {total:.3g} times what a mean over both gives "
            f"(weights {ratio} where {said} is expected): it is a sum over samples, or the weight does not "
            "belong to the sum",
            "Return a mean over the samples, or (sum, number of what was summed)",
        )
    else:
        report.find(
            _FIELD,
            f"{how}, but the micro-batches do not count alike: together, they weigh {ratio}, and added up as "
            f"micro-batches {said}. It divides by a number that differs between micro-batches, such as that "
            "of labels that are not masked",
            "Return (sum, weight), for example (cross_entropy(..., reduction='sum'), "
            "(labels != -100).sum()), or (mean * weight, weight) of a model's own mean; (mean, 1) if "
            "micro-batches shall count alike",
        )


def _loss(training: Training, output: Any, batch: dict[str, Tensor]) -> Loss:
    """The user's loss, which must lead back to the model: otherwise the job would run and train nothing."""
    with run_as_python():
        loss: Any = training.loss(output, batch)
    total, weight = sum_and_weight(loss)
    refuse_metric(weight)
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


def _value(loss: Any) -> float:
    total, weight = sum_and_weight(loss)
    return float(total.detach()) / (float(weight) or 1.0)  # a micro-batch may have nothing to be summed


def _where_trained(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return change(value) if isinstance(value, Tensor) and value.requires_grad else value


def _halved(value: Tensor) -> Tensor:
    return value * 0.5


def _turned(places: int, value: Tensor) -> Tensor:
    """The numbers of each row in another order."""
    return value.roll(places, -1) if value.ndim else value
