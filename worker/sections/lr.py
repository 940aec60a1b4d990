"""Learning rates: each parameter group's initial rate times the schedule's factor for the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from ...model.errors import UserCodeError
from ...model.training import call_user_code

Schedule = Callable[[int], float | Sequence[float]]


class LearningRates:
    """Sets an optimizer's learning rates. `schedule`: a factor for all groups, or one for each of them.

    A rate that is a tensor becomes the group's own: the user's may belong to other sections' groups as well.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"].detach().clone()
        self._optimizer = optimizer
        self._schedule = schedule
        rates = [group.get("lr") for group in optimizer.param_groups]
        # Some optimizers compute a rate of their own where lr is None, such as transformers' Adafactor.
        self._initial = [float(rate) for rate in rates if isinstance(rate, int | float | Tensor)]
        if schedule is not None and len(self._initial) != len(optimizer.param_groups):
            raise UserCodeError(
                "Training.schedule: the optimizer's parameter groups have no 'lr' that a schedule could "
                "set; leave the schedule out"
            )

    def set(self, step: int) -> None:
        """Set the rates for `step`. Raises `UserCodeError` if the schedule raises, or gives a wrong number of
        factors."""
        if self._schedule is None:
            return
        groups = self._optimizer.param_groups
        for group, initial, factor in zip(groups, self._initial, self._factors(step), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(initial * factor)
            else:
                group["lr"] = initial * factor

    def _factors(self, step: int) -> list[float]:
        assert self._schedule is not None
        what = f"Training.schedule({step})"
        value: Any = call_user_code(what, self._schedule, step)
        count = len(self._initial)
        if isinstance(value, list | tuple):
            factors = cast(Sequence[Any], value)
            if len(factors) != count:
                raise UserCodeError(
                    f"{what}: {len(factors)} factors for {count} parameter groups; give one for each group, "
                    "in their order, and make the same groups in every section (a group may be empty)"
                )
            return call_user_code(what, lambda: [float(factor) for factor in factors])
        return [call_user_code(what, lambda: float(value))] * count
