"""Whether one optimizer per section does what one optimizer over the whole model does.

Tried on small stand-ins for the parameters, so that it costs nothing at any size: with usual gradients, with
gradients so large that any clipping shows, and with an infinite one in one section, as loss scaling meets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...model.partition.partition import Sections
from ...model.seeds import seed64
from ...model.training import Training, call_user_code
from ..sections.optimizers import OwnSettings, make_optimizer
from .calls import Calls
from .findings import TOLERANCE, Report, differences, some
from .global_state import Watch
from .random_numbers import FixedNumbers

Gradient = Callable[[str, Tensor], Tensor]  # (parameter's name, its value) -> a gradient

_FIELD = "Training.optimizer"
_WEIGHT = 0.05  # standard deviation of the stand-ins
_LARGEST = 4  # elements along a dimension
_LARGE = 1e4  # times the usual gradient: beyond any limit that people clip by
_ROUNDING = 4 * 2.0**-24 * _WEIGHT / TOLERANCE  # a change is known to the rounding of the weight
_ONE_PER_SECTION = "Makara makes one optimizer per section, from that section's parameters alone"


def check_optimizer(training: Training, chain: Sections, watch: Watch, report: Report) -> None:
    """Raises `UserCodeError` when the optimizer itself raises."""
    sections = [list(section.trainable) for section in chain.sections if section.trainable]
    if sections:
        _Probe(training, chain, sections).run(watch, report)


class _Probe:
    def __init__(self, training: Training, chain: Sections, sections: Sequence[Sequence[str]]) -> None:
        self._training = training
        self._tensors = chain.traced.tensors
        self._sections = sections
        self._source = sections[0][0]
        near = {name for section in sections if self._source in section for name in section}
        self._all = list(chain.trainable_names)
        self._others = [name for name in self._all if name not in near]  # share no section with the source

    def run(self, watch: Watch, report: Report) -> None:
        calls = Calls()
        with calls.watched(), watch.over():
            whole, parts = self._whole(), self._in_sections()
            differ = _differ(whole.step(_usual), parts.step(_usual), self._all)
            differ = differ or _differ(whole.step(_large), parts.step(_large), self._all)
        parts.check_state()
        calls.blame(_FIELD, report)
        if not report.blames(_FIELD):
            if differ:
                self._blame_update(differ, list(watch.changed), report)
            else:
                self._check_skipping(report)

    def _whole(self) -> _SmallOptimizers:
        return _SmallOptimizers(self._training, self._tensors, [self._all])

    def _in_sections(self) -> _SmallOptimizers:
        return _SmallOptimizers(self._training, self._tensors, self._sections)

    def _blame_update(self, differ: list[str], changed: list[str], report: Report) -> None:
        if touched := self._coupled():
            report.find(
                _FIELD,
                f"the update of {some(touched)} depends on the gradient of {self._source!r} in another "
                "section, as with a norm over all parameters (LAMB with a global norm, clipping). "
                f"{_ONE_PER_SECTION}",
                "Use a norm per parameter; declare clipping as Training(clip_grad_norm=...), which is over "
                "the whole model",
            )
            return
        state = f" ({', '.join(changed[:4])} changed)" if changed else " (a global, a shared dict, a counter)"
        report.find(
            _FIELD,
            f"one over the whole model and one per section update {some(differ)} differently from the same "
            f"gradients: it keeps state outside `optimizer.state`{state}, or an option or the result depends "
            f"on the order or number of the parameters. {_ONE_PER_SECTION}, on any machine",
            "Keep all state in `self.state[parameter]`, and let a parameter's options (such as lr) follow "
            "from its own name or shape",
        )

    def _coupled(self) -> list[str]:
        """The parameters of other sections whose update the source's gradient changes."""
        for gradient in (_usual, _large):
            plain, again = self._whole().step(gradient), self._whole().step(gradient)
            if _differ(plain, again, self._all):
                return []  # it depends on what ran before: no gradient is to blame
            changed = self._whole().step(_times(gradient, self._source, 3.0))
            if touched := _differ(plain, changed, self._others):
                return touched
        return []

    def _check_skipping(self, report: Report) -> None:
        """An infinite gradient in one section must not decide about the others' update."""
        gradient = _times(_usual, self._source, math.inf)
        names = _differ(self._whole().step(gradient), self._in_sections().step(gradient), self._others)
        if names:
            report.find(
                _FIELD,
                f"when the gradient of {self._source!r} overflows, one optimizer over the whole model "
                f"updates {some(names)} otherwise than a section's does: it decides about overflow by "
                f"itself. {_ONE_PER_SECTION}",
                "Leave loss scaling and skipped steps to Makara: training.precision: fp16 in the job file",
            )


class _SmallOptimizers:
    """The user's optimizer, one for each group of names, over parameters with the model's names, types and
    numbers of dimensions, and a few elements."""

    def __init__(
        self, training: Training, tensors: Mapping[str, Tensor], groups: Iterable[Sequence[str]]
    ) -> None:
        self._made: list[tuple[dict[str, nn.Parameter], torch.optim.Optimizer, OwnSettings]] = []
        for group in groups:
            parameters = {name: _small(name, tensors[name]) for name in group}
            optimizer = make_optimizer(training, list(parameters.items()))
            assert optimizer is not None, "a group has parameters"
            self._made.append((parameters, optimizer, OwnSettings(optimizer, 0, scheduled=False)))

    def step(self, gradient: Gradient) -> dict[str, Tensor]:
        """Each parameter's change. Raises `UserCodeError` when the optimizer raises."""
        changes: dict[str, Tensor] = {}
        for parameters, optimizer, _ in self._made:
            before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                parameter.grad = gradient(name, parameter).to(parameter.dtype)
            with FixedNumbers():
                call_user_code("optimizer.step()", cast(Callable[[], object], optimizer.step))
            changes |= {name: parameters[name].detach() - old for name, old in before.items()}
        return changes

    def check_state(self) -> None:
        """Raises `UserCodeError` when an optimizer keeps what cannot be saved."""
        for _, _, settings in self._made:
            settings.state()


def _differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    chosen = list(names)
    apart = differences({n: one[n] for n in chosen}, {n: other[n] for n in chosen}, _ROUNDING)
    return [name for name, value in apart.items() if value > TOLERANCE]


def _small(name: str, tensor: Tensor) -> nn.Parameter:
    shape = [min(size, _LARGEST) for size in tensor.shape]
    return nn.Parameter((_normal("weight", name, shape) * _WEIGHT).to(tensor.dtype))


def _usual(name: str, value: Tensor) -> Tensor:
    return _normal("gradient", name, value.shape) * _WEIGHT


def _large(name: str, value: Tensor) -> Tensor:
    return _usual(name, value) * _LARGE


def _times(gradient: Gradient, source: str, factor: float) -> Gradient:
    return lambda name, value: gradient(name, value) * (factor if name == source else 1.0)


def _normal(what: str, name: str, shape: Sequence[int]) -> Tensor:
    return torch.randn(
        list(shape), generator=torch.Generator().manual_seed(seed64(f"probe {what}", name) >> 1)
    )
