"""Whether the mean of the micro-batches' losses is the loss of the micro-batches together.

For samples that count alike, and for a declared (sum, weight), the gradient of two micro-batches together is
the weighted mean of theirs. Fitting the weights to the gradients tells a loss that weighs otherwise (a mean
over unequal numbers of targets) from one that ties samples to each other (a balance of experts' load), which
has no weights that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.errors import UserCodeError
from ...model.training import Training
from .batch_gradient import Point, by_outputs, by_parameters
from .eager import EagerModel
from .findings import Finding
from .loss_recorder import LossListener

_FIELD = "Training.loss"
_DIFFERS = 1e-4  # of the gradient's norm: batches of another size run other kernels, so more than `TOLERANCE`
_FITS = 0.1  # weights explain a difference when this part of it, at most, is left
_SCALE = 0.02  # weights that fit add up to 1 by so much


@dataclass(frozen=True, slots=True)
class LossReport:
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def check_calls(listener: LossListener) -> tuple[Finding, ...]:
    """What the loss did while the user's module ran: it must be a function of output and batch alone."""
    found: list[Finding] = []
    if listener.repeated is not None:
        once, again = listener.repeated
        found.append(
            Finding(
                _FIELD,
                f"it gives {once:.9g} and then {again:.9g} for the same output and batch: it keeps state, or "
                "changes its arguments in place. Micro-batches are computed on any machine, in any order",
                "Make it a function of the output and the batch alone",
            )
        )
    if scaler := listener.calls.scaling:
        found.append(
            Finding(
                _FIELD,
                f"it uses torch.amp.GradScaler at {scaler.place}: nothing would divide the gradients by the "
                "scale for all sections alike",
                "Return the plain loss and set training.precision: fp16 in the job file",
            )
        )
    return tuple(found)


def check_weights(
    training: Training, eager: EagerModel, listener: LossListener, wanted: Sequence[str]
) -> LossReport:
    """`listener`: it heard two micro-batches. `wanted`: parameters by whose gradients to judge where outputs
    cannot be put together; the nearer they are to the output, the less they cost."""
    weights = listener.weights
    if weights == [1.0, 1.0]:
        return LossReport()  # (mean, 1): the user says that micro-batches count alike
    try:
        points = by_outputs(training, eager, listener.heard) or by_parameters(eager, listener.heard, wanted)
    except UserCodeError as error:
        reason = error.message.splitlines()[0]
        return LossReport(
            notes=(
                f"whether micro-batches count alike is not known: a batch twice as large fails ({reason})",
            )
        )
    return _judge(points, weights)


def _judge(points: Point, weights: Sequence[float] | None) -> LossReport:
    given = weights if weights is not None else [1.0] * len(points.apart)
    share = [weight / sum(given) for weight in given]
    basis = torch.stack(points.apart, dim=1)
    size = float(points.together.norm())
    if size == 0.0 or not bool(torch.isfinite(points.together).all()):
        return LossReport()
    apart = _left(points.together, basis, torch.tensor(share, dtype=torch.float64)) / size
    if apart <= _DIFFERS:
        return LossReport()
    fitted = torch.linalg.lstsq(basis, points.together.unsqueeze(1), driver="gelsd").solution.flatten()
    if _left(points.together, basis, fitted) / size > max(_DIFFERS, _FITS * apart):
        return LossReport(
            notes=(
                "the loss ties the samples of a micro-batch to each other (no weighted mean of the "
                "micro-batches' losses is their loss together), so the micro-batch size is part of what is "
                "trained",
            )
        )
    return LossReport(findings=(_unequal(fitted.tolist(), share, declared=weights is not None),))


def _left(together: Tensor, basis: Tensor, weights: Tensor) -> float:
    return float((together - basis @ weights).norm())


def _unequal(fitted: Sequence[float], share: Sequence[float], *, declared: bool) -> Finding:
    total = sum(fitted)
    how = "it returns (sum, weight)" if declared else "it returns a mean"
    ratio = " : ".join(f"{weight:.4g}" for weight in fitted)
    said = " : ".join(f"{weight:.4g}" for weight in share)
    if abs(total - 1.0) > _SCALE:
        return Finding(
            _FIELD,
            f"{how}, but two micro-batches together give {total:.3g} times what a mean over both gives "
            f"(weights {ratio} where {said} is expected): it is a sum over samples, or the weight does not "
            "belong to the sum",
            "Return a mean over the samples, or (sum, number of what was summed)",
        )
    return Finding(
        _FIELD,
        f"{how}, but the micro-batches do not count alike: together, they weigh {ratio}, and added up as "
        f"micro-batches {said}. It divides by a number that differs between micro-batches, such as that of "
        "labels that are not masked",
        "Return (sum, weight), for example (cross_entropy(..., reduction='sum'), (labels != -100).sum()), or "
        "(mean * weight, weight) of a model's own mean; (mean, 1) if micro-batches shall count alike",
    )
