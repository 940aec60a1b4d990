"""The user's own module, run as they would on one device: what a step in sections is compared with.

The module is called as it is (its hooks, custom functions and in-place changes included), from the same
initial weights and on the same micro-batches, with gradients accumulated by autograd. Only buffers follow
Makara's definition: every micro-batch begins with their values of the step's beginning, and the results are
combined (see `buffer_updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.data import Batches, copied
from ...model.errors import UserCodeError
from ...model.seeds import preserved_randomness, seed64, seed_everything
from ...model.torch_private.higher_order import run_as_python
from ...model.tracing.calling import forward_call
from ...model.tracing.trace import TracedModel
from ...model.training import Training, build_module, call_user_code, set_training_mode, sum_and_weight
from ..sections.buffer_updates import combine
from ..sections.grad_sums import mean_loss
from ..sections.lr import LearningRates


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step before anything is applied; names are the model's own, tied ones by the first."""

    losses: tuple[tuple[float, float], ...]  # each micro-batch's (loss sum, weight)
    gradients: dict[str, Tensor]  # of the mean loss; parameters that nothing flows to are left out
    buffers: dict[str, Tensor]  # after the step

    @property
    def loss(self) -> float:
        return mean_loss(self.losses)[0]


class EagerModel:
    """The user's module with a job's initial weights. `module` and `optimizer` are open to inspection."""

    def __init__(self, training: Training, traced: TracedModel, batches: Batches, *, seed: int = 0) -> None:
        """`batches`: of the job's m. Raises `UserCodeError` when the model or the optimizer raises."""
        self._training = training
        self._traced = traced
        self._batches = batches
        self._seed = seed
        with preserved_randomness():
            seed_everything(seed64("construct", seed))
            built: Any = call_user_code("Training.model", build_module, training)
            self.module: nn.Module = built
        self.load_initial()
        set_training_mode(self.module)
        trainable = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.optimizer = call_user_code("Training.optimizer", training.optimizer, trainable)
        self._rates = LearningRates(self.optimizer, training.schedule)
        self.changed_by_backward: set[str] = set()
        """Buffers that backward changes once more: checkpointed layers run twice, and count once."""

    def step(self, step: int) -> CheckedStep:
        """Forward and backward of all micro-batches of `step`; changes no weight and no buffer."""
        initial = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        found: dict[str, list[Tensor]] = {name: [] for name in initial}
        losses: list[tuple[float, float]] = []
        self.module.zero_grad(set_to_none=True)
        for i in range(self._batches.num_micro_batches):
            losses.append(self._micro_batch(step, i, found))
            self.set_buffers(initial)
        _, weight = mean_loss(losses)
        gradients = {
            name: parameter.grad / weight
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }
        self.module.zero_grad(set_to_none=True)
        buffers = {name: _after(initial.get(name), values) for name, values in found.items()}
        return CheckedStep(tuple(losses), gradients, buffers)

    def apply(self, step: int, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Apply the step with one optimizer over the whole model: clipping, schedule, update, buffers."""
        self._rates.set(step)
        limit = self._training.clip_grad_norm
        # Of the gradients as they were summed, before a parameter of few bits rounds them.
        norm = torch.tensor(0.0) if limit is None else torch.nn.utils.get_total_norm(gradients.values())
        for name, parameter in self.module.named_parameters():
            found = gradients.get(name)
            parameter.grad = None if found is None else found.to(parameter.dtype, copy=True)
            if parameter.grad is not None and limit is not None:
                parameter.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0)
        call_user_code("optimizer.step()", cast(Callable[[], object], self.optimizer.step))
        self.module.zero_grad(set_to_none=True)
        self.set_buffers(buffers)

    def output(self, batch: Mapping[str, Tensor]) -> Any:
        """The module's output for a batch, of any size that it takes."""
        call = forward_call(self.module, batch, self._training.forward_kwargs)
        with run_as_python():
            return call_user_code("the model's forward", lambda: self.module(**call.arguments(batch)))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Any:
        """The result of the user's loss."""
        with run_as_python():
            return call_user_code("Training.loss", self._training.loss, output, copied(batch))

    def _micro_batch(self, step: int, i: int, found: dict[str, list[Tensor]]) -> tuple[float, float]:
        """Adds to `found` the buffers as forward leaves them."""
        batch = self._batches.micro_batch(step, i)
        with preserved_randomness():
            seed_everything(seed64("eager", self._seed, step, i))
            loss: Any = self.loss(self.output(batch), batch)
        total, weight = sum_and_weight(loss)
        buffers = dict(self.module.named_buffers())
        for name, buffer in buffers.items():
            found.setdefault(name, []).append(buffer.detach().clone())
        with run_as_python():  # checkpointed parts of forward run once more
            call_user_code("the loss's backward", total.backward)
        changed = {name for name, buffer in buffers.items() if not torch.equal(buffer, found[name][-1])}
        self.changed_by_backward |= changed
        return float(total.detach()), float(weight)

    def load_initial(self) -> None:
        """Put the job's initial values into weights and buffers."""
        known = self._traced.tensors
        with torch.no_grad():
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                if name not in known or known[name].shape != tensor.shape:
                    raise UserCodeError(
                        f"Training.model: it builds another model each time: {name!r} is "
                        f"{list(tensor.shape)} now and was "
                        f"{list(known[name].shape) if name in known else 'not there'}"
                    )
                _write(tensor, self._traced.initial(name))

    def move_last_bits(self) -> float:
        """Make every weight larger or smaller by its last bit; returns the largest relative change."""
        numbers, largest = torch.Generator().manual_seed(1), 0.0
        with torch.no_grad():
            for weight in self.module.parameters():
                bit = torch.finfo(weight.dtype).eps
                sign = torch.randint(0, 2, weight.shape, generator=numbers) * 2 - 1
                weight.mul_((1 + sign * bit).to(weight.dtype))
                largest = max(largest, bit)
        return largest

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Put `values` into the buffers of their names."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in values:
                    _write(buffer, values[name])


def _write(target: Tensor, value: Tensor) -> None:
    """Copy `value` into `target`, once where an expanded dimension repeats one element."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def _after(before: Tensor | None, values: list[Tensor]) -> Tensor:
    if before is not None and all(torch.equal(value, before) for value in values):
        return before
    return combine(values)
