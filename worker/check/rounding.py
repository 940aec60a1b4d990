"""How far rounding alone takes the user's own module: one step as it is against the same step in float64.

What the pieces differ by is only blamed beyond that: a gradient that comes out of terms which cancel, such as
through batch norm on few values, is not better known in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...model.data import Batches, Sample
from ...model.errors import WorkerError
from ...model.tracebacks import first_line
from ...model.tracing.trace import TracedModel
from ...model.training import Training
from .eager import EagerModel, EagerResult
from .findings import difference, some
from .random_numbers import FixedNumbers, default_dtype

LOSS = "the micro-batches"
_TIMES = 4  # both sides are off, each in its own way; one way of one side is known
_OTHER_NUMBERS = 1e-2  # losses further apart than that are not of the same computation


@dataclass(frozen=True, slots=True)
class Rounding:
    """Relative differences between the module's step in its own types and in float64. `unknown`: why there
    are none."""

    loss: Mapping[str, float] = field(default_factory=dict[str, float])
    gradients: Mapping[str, float] = field(default_factory=dict[str, float])
    buffers: Mapping[str, float] = field(default_factory=dict[str, float])
    unknown: str | None = None


class Allowance:
    """Tells differences that rounding explains from those that it does not. The module is run in float64 when
    the first one beyond `TOLERANCE` is asked about."""

    def __init__(self, run: Callable[[], Rounding]) -> None:
        self._run = run
        self._own: Rounding | None = None
        self.notes: list[str] = []
        """What was let pass."""

    def beyond(
        self, kind: str, apart: Mapping[str, float], of: Callable[[Rounding], Mapping[str, float]]
    ) -> list[str]:
        """The names in `apart` (with differences beyond `TOLERANCE`) that differ by more than rounding. `of`:
        the module's own differences of that kind."""
        if not apart:
            return []
        own = of(self._rounding())
        left = [name for name, value in apart.items() if value > _TIMES * own.get(name, 0.0)]
        passed = {name: value for name, value in apart.items() if name not in left}
        if passed:
            name = max(passed, key=lambda name: passed[name])
            self.notes.append(
                f"the {kind} of {some(passed)} differs by up to {passed[name]:.1g}, which is rounding: your "
                f"module itself is {own[name]:.1g} off its own result in float64"
            )
        return left

    def doubt(self) -> str:
        """What to add where a difference is blamed that may be rounding."""
        unknown = self._rounding().unknown
        return "" if unknown is None else f". Whether rounding explains it is not known: {unknown}"

    def _rounding(self) -> Rounding:
        if self._own is None:
            self._own = self._run()
        return self._own


def own_rounding(
    training: Training, traced: TracedModel, batches: Batches, seed: int, plain: EagerResult, floor: float
) -> Rounding:
    """Runs a second module, in float64; `plain` is the step of the first. `floor`: of gradients' magnitudes.

    Memory: twice the parameters' and gradients' in fp32, and twice the activations of one micro-batch.
    """
    try:
        with default_dtype(torch.float64), FixedNumbers(drawn_in_fp32=True):
            wide = EagerModel(training, traced, Doubles(batches), seed=seed, dtype=torch.float64).step(0)
    except WorkerError as error:
        return Rounding(unknown=f"it does not run in float64 ({first_line(error)})")
    loss = difference(_numbers(plain), _numbers(wide))
    if loss > _OTHER_NUMBERS:
        return Rounding(unknown=f"in float64 its loss is another ({wide.loss:.7g} for {plain.loss:.7g})")
    return Rounding(
        {LOSS: loss},
        {name: _apart(value, wide.gradients.get(name), floor) for name, value in plain.gradients.items()},
        {name: _apart(value, wide.buffers.get(name), 1e-30) for name, value in plain.buffers.items()},
    )


class Doubles(Batches):
    """Micro-batches whose numbers of floating point are float64."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def num_micro_batches(self) -> int:
        return self._batches.num_micro_batches

    def micro_batch(self, step: int, i: int) -> Sample:
        sample = self._batches.micro_batch(step, i)
        return {
            name: value.double() if value.is_floating_point() else value for name, value in sample.items()
        }


def _apart(plain: Tensor, wide: Tensor | None, floor: float) -> float:
    found = math.inf if wide is None else difference(plain.double(), wide.double(), floor)
    return found if math.isfinite(found) else 0.0


def _numbers(result: EagerResult) -> Tensor:
    return torch.tensor(result.pieces, dtype=torch.float64)
