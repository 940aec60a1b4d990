"""Decides whether a step's gradient can be applied, equally on all ranks, from the norms in the commit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...model.errors import NonFiniteGradient
from .grad_sums import global_norm
from .loss_scale import LossScale

_NAMED = 3  # parameters that a message names


def total_norm(norms: Sequence[float]) -> torch.Tensor:
    """The norm of the whole gradient, float32, from the parameters' norms in the model's order."""
    return global_norm([torch.tensor(norm, dtype=torch.float32) for norm in norms])


def is_usable(step: int, names: Sequence[str], norms: Sequence[float], loss_scale: LossScale | None) -> bool:
    """Whether the gradient is finite; if not, the step is skipped and the loss scale halved.

    `norms`: of the parameters `names`, in the model's order. Raises `NonFiniteGradient` naming parameters if
    a smaller loss scale cannot help.
    """
    total = float(total_norm(norms))
    if math.isfinite(total):
        return True
    if loss_scale is not None and not loss_scale.exhausted:
        return False
    bad = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
    shown = ", ".join(repr(name) for name in bad[:_NAMED])
    if len(bad) > _NAMED:
        shown += f" and {len(bad) - _NAMED} more"
    what = f"the gradient of {shown}" if bad else "the norm of the gradient"
    also = "" if loss_scale is None else f", even with a loss scale of {loss_scale.scale}"
    raise NonFiniteGradient(f"step {step}: {what} is infinite or not a number{also}")
