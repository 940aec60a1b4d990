"""Whether one optimizer per section does what one optimizer over the whole model does.

Tried on small stand-ins for the parameters, so that it costs nothing at any size: with usual gradients, with
gradients so large that any clipping shows, and with an infinite one in one section, as loss scaling meets it.
A few parameters live longer: on other gradients in each step, and down a quadratic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from ...model.errors import UserCodeError
from ...model.partition.partition import Sections
from ...model.training import Training, call_user_code
from .calls import Calls
from .findings import Report, some
from .global_state import Watch
from .kept_state import check_kept_state
from .random_numbers import FixedNumbers
from .small_optimizers import (
    MANY_STEPS,
    NUM_STEPS,
    SEQUENCES,
    Gradient,
    GradientSequence,
    SmallOptimizers,
    differ,
    large,
    times,
    usual,
)

_FIELD = "Training.optimizer"
_ONE_PER_SECTION = "Makara makes one optimizer per section, from that section's parameters alone"
_MODES = (
    "Training.optimizer has train() and eval(): checkpoints and exports hold the weights of training, not "
    "those of evaluation. Compute these from a checkpoint, which holds the optimizer's state, too "
    '(docs/precision.md, "Weights for evaluation")'
)
_MOST_FACTORS = 10_000  # that a schedule is asked for
_MOST_SCHEDULE_S = 3.0  # one that steps a scheduler of torch up to the step takes longer with each step
_MOST_SECTIONS = 3  # that live longer
_MOST_PARAMETERS = 6  # of each of them


def check_optimizer(training: Training, chain: Sections, watch: Watch, report: Report) -> None:
    """Raises `UserCodeError` when the optimizer itself raises."""
    sections = [list(section.trainable) for section in chain.sections if section.trainable]
    if sections:
        _Probe(training, chain, sections).run(watch, report)


def check_schedule(training: Training, steps: int) -> None:
    """Ask for the factors of the last step, and of the others for a few seconds. Raises `UserCodeError`."""
    if training.schedule is None or not steps:
        return
    began = time.monotonic()
    for step in (steps - 1, *range(0, steps, 1 + steps // _MOST_FACTORS)):
        if time.monotonic() - began > _MOST_SCHEDULE_S:
            return
        what = f"Training.schedule({step})"
        value: Any = call_user_code(what, training.schedule, step)
        if not call_user_code(what, _is_finite, value):
            raise UserCodeError(f"{what}: it gives {value}; expected a finite factor")


def _is_finite(factors: Any) -> bool:
    """Of one factor, or of one for each parameter group."""
    given = cast(Sequence[Any], factors if isinstance(factors, list | tuple) else [factors])
    return all(math.isfinite(float(factor)) for factor in given)


class _Probe:
    def __init__(self, training: Training, chain: Sections, sections: Sequence[Sequence[str]]) -> None:
        self._training = training
        self._tensors = chain.traced.tensors
        self._sections = sections
        self._source = sections[0][0]
        near = {name for section in sections if self._source in section for name in section}
        self._all = list(chain.trainable_names)
        self._others = [name for name in self._all if name not in near]  # share no section with the source
        self._few = _few(sections, chain)
        self._shared = [name for name in chain.shared if name in self._all]
        self._numbers = FixedNumbers()

    def run(self, watch: Watch, report: Report) -> None:
        calls = Calls()
        with calls.watched(), watch.over():
            whole, parts = self._optimizers([self._all]), self._optimizers(self._sections)
            differing = self._differ(whole, parts, usual) or self._differ(whole, parts, large)
            for sequence in SEQUENCES:
                differing = differing or self._runs_differ(sequence)
        parts.check_state()
        if whole.has_modes:
            report.notes.append(_MODES)
        calls.blame(_FIELD, report)
        if report.blames(_FIELD):
            return
        if differing:
            self._blame_update(differing, list(watch.changed), report)
            return
        self._check_skipping(report)
        if self._numbers.counts and self._shared:
            report.find(
                _FIELD,
                f"its step draws random numbers, and {some(self._shared)} is in several sections, which "
                f"would each draw others for it. {_ONE_PER_SECTION}",
                "Use an optimizer that draws none, or untie the weights",
            )
        if not report.blames(_FIELD):
            check_kept_state(self._training, self._tensors, self._few, report)

    def _optimizers(self, groups: Sequence[Sequence[str]]) -> SmallOptimizers:
        return SmallOptimizers(self._training, self._tensors, groups)

    def _whole_of_few(self) -> SmallOptimizers:
        return self._optimizers([list(dict.fromkeys(name for section in self._few for name in section))])

    def _differ(self, whole: SmallOptimizers, parts: SmallOptimizers, gradient: Gradient) -> list[str]:
        return differ(
            whole.step(gradient, fixed=self._numbers), parts.step(gradient, fixed=self._numbers), self._all
        )

    def _runs_differ(self, sequence: GradientSequence) -> list[str]:
        whole, parts = self._whole_of_few(), self._optimizers(self._few)
        fixed = self._numbers if self._numbers.counts else None  # it makes each operation slower
        runs = (optimizers.run(sequence, steps=MANY_STEPS, fixed=fixed) for optimizers in (whole, parts))
        for step, (one, other) in enumerate(zip(*runs, strict=False), 1):
            if names := differ(one, other, self._all):
                return names
            if step >= NUM_STEPS and parts.same_settings(whole):
                break
        return []

    def _blame_update(self, differing: list[str], changed: list[str], report: Report) -> None:
        if touched := self._coupled():
            report.find(
                _FIELD,
                f"the update of {some(touched)} depends on the gradient of {self._source!r} in another "
                "section, as with a norm over all parameters (LAMB with a global norm, clipping) or a step "
                f"size that is estimated from all of them (Prodigy, D-Adaptation). {_ONE_PER_SECTION}",
                "Use an optimizer that looks at one parameter at a time (AdamW, Lion, Adafactor, Muon), with "
                "a norm per parameter; declare clipping as Training(clip_grad_norm=...), which is over the "
                "whole model",
            )
            return
        state = f" ({', '.join(changed[:4])} changed)" if changed else " (a global, a shared dict, a counter)"
        report.find(
            _FIELD,
            f"one over the whole model and one per section update {some(differing)} differently from the "
            f"same gradients: it keeps state outside `optimizer.state`{state}, or an option or the result "
            f"depends on the order or number of the parameters. {_ONE_PER_SECTION}, on any machine",
            "Keep all state in `self.state[parameter]`, and let a parameter's options (such as lr) follow "
            "from its own name or shape",
        )

    def _coupled(self) -> list[str]:
        """The parameters of other sections whose update the source's gradient changes."""
        for gradient in (usual, large):
            plain, again = (self._one_step(gradient) for _ in range(2))
            if differ(plain, again, self._all):
                return []  # it depends on what ran before: no gradient is to blame
            changed = self._one_step(times(gradient, self._source, -3.0))
            if touched := differ(plain, changed, self._others):
                return touched
        for sequence in SEQUENCES:
            both = (sequence, self._turned(sequence))
            runs = (self._whole_of_few().run(one, steps=MANY_STEPS, fixed=self._numbers) for one in both)
            for one, other in zip(*runs, strict=False):
                if touched := differ(one, other, self._others):
                    return touched
        return []

    def _one_step(self, gradient: Gradient) -> dict[str, Tensor]:
        return self._optimizers([self._all]).step(gradient, fixed=self._numbers)

    def _turned(self, sequence: GradientSequence) -> GradientSequence:
        return lambda step: times(sequence(step), self._source, -3.0)

    def _check_skipping(self, report: Report) -> None:
        """An infinite gradient in one section must not decide about the others' update."""
        gradient = times(usual, self._source, math.inf)
        whole, parts = self._optimizers([self._all]), self._optimizers(self._sections)
        try:
            names = [name for name in self._differ(whole, parts, gradient) if name in self._others]
        except UserCodeError:
            return  # it takes no such gradient, and never gets one: a step that overflows is skipped
        if names:
            report.find(
                _FIELD,
                f"when the gradient of {self._source!r} overflows, one optimizer over the whole model "
                f"updates {some(names)} otherwise than a section's does: it decides about overflow by "
                f"itself. {_ONE_PER_SECTION}",
                "Leave loss scaling and skipped steps to Makara: training.precision: fp16 in the job file",
            )


def _few(sections: Sequence[Sequence[str]], chain: Sections) -> list[list[str]]:
    """A few parameters, of each kind in a few sections; among them the first one of the model."""
    last = len(sections) - 1
    chosen = sorted({last * number // max(1, _MOST_SECTIONS - 1) for number in range(_MOST_SECTIONS)})
    return [_kinds(sections[index], chain) for index in chosen]


def _kinds(names: Sequence[str], chain: Sections) -> list[str]:
    """The first parameter of each kind."""
    tensors = chain.traced.tensors
    found: dict[tuple[object, ...], str] = {}
    for name in names:
        found.setdefault((name.rpartition(".")[2], tensors[name].dim(), tensors[name].dtype), name)
    return list(found.values())[:_MOST_PARAMETERS]
