"""Whether one optimizer per section does what one optimizer over the whole model does.

Tried on small stand-ins for the parameters, so that it costs nothing at any size: with usual gradients, with
gradients so large that any clipping shows, and with an infinite one in one section, as loss scaling meets it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...model.partition.partition import Sections
from ...model.seeds import seed64
from ...model.training import Training
from .calls import Calls
from .findings import TOLERANCE, Finding, differing, some
from .global_state import Watch
from .small_optimizers import WEIGHT, Gradient, SmallOptimizers

_FIELD = "Training.optimizer"
_LARGE = 1e4  # times the usual gradient: beyond any limit that people clip by
_ROUNDING = 4 * 2.0**-24 * WEIGHT / TOLERANCE  # a change is known to the rounding of the weight
_ONE_PER_SECTION = "Makara makes one optimizer per section, from that section's parameters alone"


def check_optimizer(training: Training, chain: Sections, watch: Watch) -> list[Finding]:
    """Raises `UserCodeError` when the optimizer itself raises."""
    return _Probe(training, chain).findings(watch)


class _Probe:
    def __init__(self, training: Training, chain: Sections) -> None:
        self._training = training
        self._tensors = chain.traced.tensors
        self._all = [list(chain.trainable_names)]
        self._sections = [list(s.trainable) for s in chain.sections if s.trainable]

    def findings(self, watch: Watch) -> list[Finding]:
        if not self._sections:
            return []
        calls = Calls()
        with calls.watched(), watch.over():
            whole, pieces = self._make(self._all), self._make(self._sections)
            differ = _differ(whole.step(_usual), pieces.step(_usual))
            differ = differ or _differ(whole.step(_large), pieces.step(_large))
        pieces.check_state()
        found = _called(calls)
        if differ and not found:
            found = [self._explain(whole, pieces, differ, list(watch.changed))]
        return found or self._skipping()

    def _make(self, groups: list[list[str]]) -> SmallOptimizers:
        return SmallOptimizers(self._training, self._tensors, groups)

    def _explain(
        self, whole: SmallOptimizers, pieces: SmallOptimizers, differ: list[str], changed: list[str]
    ) -> Finding:
        for name in differ:
            others = pieces.options(name)
            for option, value in whole.options(name).items():
                if others.get(option) != value:
                    return _option_differs(option, value, others.get(option), differ)
        if tied := self._coupled():
            source, touched = tied
            return Finding(
                _FIELD,
                f"the update of {some(touched)} depends on the gradient of {source!r} in another section, as "
                f"with a norm over all parameters (LAMB with a global norm, clipping). {_ONE_PER_SECTION}",
                "Use a norm per parameter; declare clipping as Training(clip_grad_norm=...), which is over "
                "the whole model",
            )
        state = f" ({', '.join(changed[:4])} changed)" if changed else " (a global, a shared dict, a counter)"
        return Finding(
            _FIELD,
            f"one over the whole model and one per section update {some(differ)} differently from the same "
            f"gradients: it keeps state outside `optimizer.state`{state}, or its result depends on the order "
            f"or number of the parameters. {_ONE_PER_SECTION}, on any machine",
            "Keep all state in `self.state[parameter]`",
        )

    def _coupled(self) -> tuple[str, list[str]] | None:
        """(a parameter, those of other sections whose update its gradient changes), if there are such."""
        for source in (self._sections[0][0], self._sections[-1][-1]):
            others = self._others(source)
            for gradient in (_usual, _large):
                plain, again = (self._make(self._all).step(gradient) for _ in range(2))
                if _differ(plain, again):
                    return None  # it depends on what ran before: no gradient is to blame
                changed = self._make(self._all).step(_times(gradient, source, 3.0))
                if touched := _differ({n: plain[n] for n in others}, {n: changed[n] for n in others}):
                    return source, touched
        return None

    def _skipping(self) -> list[Finding]:
        """An infinite gradient in one section must not decide about the others' update."""
        source = self._sections[0][0]
        gradient = _times(_usual, source, math.inf)
        whole = self._make(self._all).step(gradient)
        pieces = self._make(self._sections).step(gradient)
        others = self._others(source)
        names = _differ({n: whole[n] for n in others}, {n: pieces[n] for n in others})
        if not names:
            return []
        return [
            Finding(
                _FIELD,
                f"when the gradient of {source!r} overflows, one optimizer over the whole model updates "
                f"{some(names)} otherwise than a section's does: it decides about overflow by itself. "
                f"{_ONE_PER_SECTION}",
                "Leave loss scaling and skipped steps to Makara: training.precision: fp16 in the job file",
            )
        ]

    def _others(self, source: str) -> list[str]:
        """The parameters that share no section with `source`."""
        near = {name for section in self._sections if source in section for name in section}
        return [name for name in self._all[0] if name not in near]


def _called(calls: Calls) -> list[Finding]:
    found: list[Finding] = []
    if clip := calls.clipping:
        limit = clip.arguments.get("max_norm", "...")
        found.append(
            Finding(
                _FIELD,
                f"it calls torch.nn.utils.{clip.name} at {clip.place}, over the parameters that it was "
                f"given. {_ONE_PER_SECTION}, so each section would be clipped by its own norm",
                f"Remove the call and declare Training(clip_grad_norm={limit}), which clips by the norm over "
                "the whole model",
            )
        )
    if scaler := calls.scaling:
        found.append(
            Finding(
                _FIELD,
                f"it uses torch.amp.GradScaler at {scaler.place}, which decides about overflow from the "
                f"gradients that it sees. {_ONE_PER_SECTION}, so sections would skip different steps",
                "Remove the scaler and set training.precision: fp16 in the job file: Makara scales the loss, "
                "and all sections skip a step together",
            )
        )
    return found


def _option_differs(option: str, value: object, other: object, names: list[str]) -> Finding:
    return Finding(
        _FIELD,
        f"its option {option!r} for {some(names)} is {value} in one optimizer over the whole model and "
        f"{other} in a section's: it follows from which other parameters are in the list. {_ONE_PER_SECTION}",
        "Let the options of a parameter follow from its own name or shape",
    )


def _differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return list(differing(one, other, _ROUNDING)[0])


def _usual(name: str, value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed64("probe gradient", name) >> 1)
    return torch.randn(value.shape, generator=generator) * WEIGHT


def _large(name: str, value: Tensor) -> Tensor:
    return _usual(name, value) * _LARGE


def _times(gradient: Gradient, source: str, factor: float) -> Gradient:
    return lambda name, value: gradient(name, value) * (factor if name == source else 1.0)
