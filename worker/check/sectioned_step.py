"""One step of the sections, each with its own graph and optimizer, as workers run them."""

from __future__ import annotations

from torch import Tensor

from ...model.data import Batches, Sample
from ...model.partition.partition import Sections
from ...model.training import Training
from ..sections.buffer_updates import combine
from ..sections.grad_check import is_usable, total_norm
from ..sections.grad_sums import clip_coefficient, mean_loss, new_sum, parameter_norm
from ..sections.ranges import RangeRuntime
from .eager import CheckedStep


class Loaded(Batches):
    """Micro-batches of step 0 that were loaded before, so that the data draws its own random numbers."""

    def __init__(self, batches: Batches) -> None:
        self._loaded = [batches.micro_batch(0, i) for i in range(batches.num_micro_batches)]

    @property
    def num_micro_batches(self) -> int:
        return len(self._loaded)

    def micro_batch(self, step: int, i: int) -> Sample:
        return {name: value.clone() for name, value in self._loaded[i].items()}


class SectionedModel:
    """All sections of a chain on one device. Raises the user's errors, as `UserCodeError`."""

    def __init__(self, chain: Sections, training: Training, batches: Batches, seed: int) -> None:
        self._chain = chain
        self._training = training
        self._batches = batches
        self._runtime = RangeRuntime(chain, training, seed)
        for index in range(chain.num_sections):
            self._runtime.host(index)

    def step(self) -> CheckedStep:
        """Forward and backward of all micro-batches of step 0. `buffers`: those that the step changes."""
        last, num = self._chain.num_sections, self._batches.num_micro_batches
        sums = new_sum(self._chain, self._chain.trainable_names, num, "fast")
        losses: list[tuple[float, float]] = []
        updates: dict[str, list[Tensor]] = {}
        for i in range(num):
            output = self._runtime.forward(0, i, 0, last, {}, self._batches.micro_batch(0, i), keep=True)
            self._runtime.backward(i, 0, {}, lambda _, name, gradient: sums.add(name, gradient))
            assert output.piece is not None, "the last section computes the loss"
            losses.append((output.piece.loss_sum, output.piece.weight))
            for name, value in output.updates.items():
                updates.setdefault(name, []).append(value)
        _, weight = mean_loss(losses)
        buffers = {name: combine(values) for name, values in updates.items()}
        return CheckedStep(tuple(losses), dict(sums.totals(weight).gradients), buffers)

    def apply(self, result: CheckedStep) -> None:
        """Clips by the norm over all sections and lets each section's optimizer update its weights."""
        names = self._chain.trainable_names
        norms = [float(parameter_norm(result.gradients[name])) for name in names]
        is_usable(0, names, norms, None)
        clip = self._training.clip_grad_norm
        coefficient = None if clip is None else clip_coefficient(total_norm(norms), clip)
        for section in self._runtime.sections.values():
            section.apply(0, result.gradients, coefficient)
            section.state()  # raises when the optimizer keeps what cannot be saved

    def weights(self) -> dict[str, Tensor]:
        """By name; of one that several sections use, the last one's."""
        sections = self._runtime.sections.values()
        return {name: weight for section in sections for name, weight in section.trainable.items()}
