"""The user's optimizer over small stand-ins for the parameters, and the gradients that it is tried with.

Stand-ins have the model's names, types and numbers of dimensions, and a few elements: a trial costs the same
at any size of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.errors import UserCodeError
from ...model.seeds import seed64
from ...model.training import Training, call_user_code
from ..sections.lr import LearningRates
from ..sections.optimizers import OwnSettings, make_optimizer
from ..sections.state import is_reproducible, load_section_state, section_state
from ..sections.state_hash import raw_bytes
from .findings import TOLERANCE, differences
from .random_numbers import FixedNumbers

Gradient = Callable[[str, Tensor], Tensor]
"""(a parameter's name, its value) -> its gradient."""
GradientSequence = Callable[[int], Gradient]
"""The gradients of each step."""

NUM_STEPS = 20
"""Steps of a run; caches that go round are full by then."""
MANY_STEPS = 200
"""Steps in which an estimate of a step size that begins at 1e-6 grows until it moves weights."""
WEIGHT = 0.05
"""Standard deviation of the stand-ins."""
_LARGEST = 4  # elements along a dimension
_LARGE = 1e4  # times the usual gradient: beyond any limit that people clip by
_ROUNDING = 4 * 2.0**-24 * WEIGHT / TOLERANCE  # a change is known to the rounding of the weight
_SURELY_RUNS = 3  # steps


class SmallOptimizers:
    """The user's optimizer, one for each group of names."""

    def __init__(
        self, training: Training, tensors: Mapping[str, Tensor], groups: Iterable[Sequence[str]]
    ) -> None:
        self._training = training
        self._tensors = tensors
        self._groups = list(groups)
        self._made: list[tuple[dict[str, nn.Parameter], torch.optim.Optimizer, OwnSettings]] = []
        for group in self._groups:
            parameters = {name: _small(name, tensors[name]) for name in group}
            optimizer = make_optimizer(training, list(parameters.items()))
            assert optimizer is not None, "a group has parameters"
            LearningRates(optimizer, None)  # which makes rates that are tensors its own
            self._made.append((parameters, optimizer, OwnSettings(optimizer, 0, scheduled=False)))

    @property
    def first(self) -> torch.optim.Optimizer:
        return self._made[0][1]

    @property
    def has_modes(self) -> bool:
        """Whether it holds other weights for evaluation, as schedule-free optimizers do."""
        return all(callable(getattr(self.first, mode, None)) for mode in ("train", "eval"))

    def step(self, gradient: Gradient, *, fixed: FixedNumbers | None = None) -> dict[str, Tensor]:
        """Each parameter's change, with random numbers that `fixed` decides. Raises `UserCodeError` when the
        optimizer raises."""
        changes: dict[str, Tensor] = {}
        for parameters, optimizer, _ in self._made:
            before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                parameter.grad = gradient(name, parameter.detach()).to(parameter.dtype)
            with fixed or nullcontext():
                call_user_code("optimizer.step()", cast(Callable[[], object], optimizer.step))
            changes |= {name: parameters[name].detach() - old for name, old in before.items()}
        return changes

    def run(
        self,
        sequence: GradientSequence,
        begin: int = 0,
        steps: int = NUM_STEPS,
        *,
        fixed: FixedNumbers | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """The changes in some steps. A run ends where an optimizer raises, if that is later than in its first
        steps: its own schedule may be over."""
        for step in range(begin, begin + steps):
            try:
                yield self.step(sequence(step), fixed=fixed)
            except UserCodeError:
                if step < _SURELY_RUNS:
                    raise
                return

    def same_settings(self, other: SmallOptimizers) -> bool:
        """Whether the numbers in the groups of all these optimizers are those of the others' first."""
        return all(
            _alike(value, expected[key])
            for _, optimizer, _ in self._made
            for group, expected in zip(optimizer.param_groups, other.first.param_groups, strict=False)
            for key, value in group.items()
            if key in expected
        )

    def check_state(self) -> None:
        """Raises `UserCodeError` when an optimizer keeps state that cannot be saved."""
        for _, _, settings in self._made:
            settings.state()

    def state(self) -> dict[str, Tensor | str]:
        """What hosts of a section compare of it, as values that are equal where the bits are."""
        found: dict[str, Tensor | str] = {}
        for number, (parameters, optimizer, settings) in enumerate(self._made):
            for tensors, scalars in (section_state(parameters, {}, optimizer, {}, None), settings.state()):
                held = {name: raw_bytes(value).cpu().clone() for name, value in tensors.items()}
                held |= {name: repr(value) for name, value in scalars.items() if value is not None}
                found |= {f"{number}/{n}": value for n, value in held.items() if is_reproducible(n)}
        return found

    def reloaded(self) -> SmallOptimizers:
        """New optimizers, with the state of these: it is saved and loaded as a section's."""
        other = SmallOptimizers(self._training, self._tensors, self._groups)
        for (old, optimizer, settings), (new, loading, received) in zip(self._made, other._made, strict=True):
            tensors, scalars = section_state(old, {}, optimizer, {}, None)
            more_tensors, more_scalars = settings.state()
            tensors = {name: value.clone() for name, value in {**tensors, **more_tensors}.items()}
            scalars = cast(dict[str, Any], json.loads(json.dumps({**scalars, **more_scalars})))
            ours = received.load(tensors, scalars)
            load_section_state(
                new,
                {},
                loading,
                None,
                {name: value for name, value in tensors.items() if name not in ours},
                {name: value for name, value in scalars.items() if name not in ours},
            )
        return other


def unequal_entries(one: SmallOptimizers, other: SmallOptimizers) -> list[str]:
    """The entries of state whose bits differ between two optimizers."""
    ours, theirs = one.state(), other.state()
    return [
        name.partition("/")[2]
        for name in sorted(ours.keys() | theirs.keys())
        if not _same(ours.get(name), theirs.get(name))
    ]


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """The parameters that two optimizers change by different amounts."""
    chosen = [name for name in names if name in one]
    apart = differences({n: one[n] for n in chosen}, {n: other[n] for n in chosen}, _ROUNDING)
    return [name for name, value in apart.items() if value > TOLERANCE]


def _same(one: Tensor | str | None, other: Tensor | str | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _alike(value: object, other: object) -> bool:
    numbers = (int, float, Tensor)
    if not isinstance(value, numbers) or not isinstance(other, numbers):
        return True
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return bool(torch.allclose(torch.as_tensor(value), torch.as_tensor(other), rtol=TOLERANCE, atol=0.0))
    return math.isclose(value, other, rel_tol=TOLERANCE)


def usual(name: str, value: Tensor) -> Tensor:
    return normal("gradient", name, value.shape) * WEIGHT


def large(name: str, value: Tensor) -> Tensor:
    return usual(name, value) * _LARGE


def times(gradient: Gradient, source: str, factor: float) -> Gradient:
    return lambda name, value: gradient(name, value) * (factor if name == source else 1.0)


def noise(step: int) -> Gradient:
    """Gradients that have nothing to do with each other."""
    return lambda name, value: normal(f"gradient {step}", name, value.shape) * WEIGHT


def descent(step: int) -> Gradient:
    """Gradients that lead to one point: those of a quadratic."""
    del step

    def gradient(name: str, value: Tensor) -> Tensor:
        goal = normal("goal", name, value.shape) * WEIGHT
        return (value - goal) * (normal("curvature", name, value.shape).abs() + 0.5)

    return gradient


SEQUENCES: tuple[GradientSequence, ...] = (noise, descent)


def normal(what: str, name: str, shape: Sequence[int]) -> Tensor:
    return _drawn(what, name, tuple(shape))


@lru_cache(10_000)
def _drawn(what: str, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed64(f"probe {what}", name) >> 1))


def _small(name: str, tensor: Tensor) -> nn.Parameter:
    shape = [min(size, _LARGEST) for size in tensor.shape]
    return nn.Parameter((normal("weight", name, shape) * WEIGHT).to(tensor.dtype))
