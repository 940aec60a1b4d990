"""The user's own module, run as they would on one device: what a step in sections is compared with.

The module is called as it is (its hooks, custom functions and in-place changes included), from the same
initial weights and on the same micro-batches, with gradients accumulated by autograd. Only buffers follow
Makara's definition: every micro-batch begins with their values of the step's beginning, and the results are
combined (see `running`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.data import Batches
from ...model.errors import UserCodeError
from ...model.precision import Precision, autocast
from ...model.seeds import preserved_randomness, seed64, seed_everything
from ...model.tracing.calling import forward_call
from ...model.tracing.trace import TracedModel
from ...model.training import Training, build_module, call_user_code, set_training_mode
from ..sections.buffer_updates import combine
from ..sections.grad_sums import mean_loss
from ..sections.lr import LearningRates


@dataclass(frozen=True)
class EagerResult:
    """One step's outcome before anything is applied; names are the model's own, tied ones by the first."""

    loss: float
    gradients: dict[str, Tensor]  # of the mean loss; parameters that nothing flows to are left out
    buffers: dict[str, Tensor]  # after the step, persistent and not; changed or not
    pieces: tuple[tuple[float, float], ...] = ()  # each micro-batch's (loss sum, weight)
    changed_by_backward: tuple[str, ...] = ()  # buffers that backward changes once more


class EagerModel:
    """The user's module with a job's initial weights. `module` and `optimizer` are open to inspection."""

    def __init__(
        self,
        training: Training,
        traced: TracedModel,
        batches: Batches,
        *,
        seed: int = 0,
        precision: Precision = "fp32",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """`batches`: of the job's m. `dtype`: of parameters and buffers, if not their own. Raises
        `UserCodeError` when the model or the optimizer raises."""
        self._training = training
        self._batches = batches
        self._seed = seed
        self._precision: Precision = precision
        self._device = torch.device(device)
        with preserved_randomness():
            seed_everything(seed64("construct", seed))
            built: Any = call_user_code("Training.model", build_module, training)
            self.module: nn.Module = built
        self._load_initial(traced)
        set_training_mode(self.module.to(self._device, dtype))
        trainable = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.optimizer = call_user_code("Training.optimizer", training.optimizer, trainable)
        self._rates = LearningRates(self.optimizer, training.schedule)

    def step(self, step: int, loss_scale: float = 1.0) -> EagerResult:
        """Forward and backward of all micro-batches of `step`; changes no weight and no buffer.

        `loss_scale` multiplies the loss before its backward; the gradients are divided by it again.
        """
        initial = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        found: dict[str, list[Tensor]] = {name: [] for name in initial}
        pieces: list[tuple[float, float]] = []
        again: set[str] = set()
        self.module.zero_grad(set_to_none=True)
        for i in range(self._batches.num_micro_batches):
            pieces.append(self._micro_batch(step, i, loss_scale, found, again))
            self.set_buffers(initial)
        loss, weight = mean_loss(pieces)
        gradients = {
            name: parameter.grad / (weight * loss_scale)
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }
        self.module.zero_grad(set_to_none=True)
        buffers = {name: _after(initial, name, found[name]) for name in found}
        return EagerResult(loss, gradients, buffers, tuple(pieces), tuple(sorted(again)))

    def apply(self, step: int, result: EagerResult) -> None:
        """What one optimizer over the whole model makes of the step: clipping, schedule, update, buffers."""
        self._rates.set(step)
        parameters = dict(self.module.named_parameters())
        for name, parameter in parameters.items():
            found = result.gradients.get(name)
            parameter.grad = None if found is None else found.to(parameter.dtype, copy=True)
        if self._training.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), self._training.clip_grad_norm)
        call_user_code("optimizer.step()", cast(Callable[[], object], self.optimizer.step))
        self.module.zero_grad(set_to_none=True)
        self.set_buffers(result.buffers)

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and buffers by name, on the CPU."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}

    def output(self, batch: Mapping[str, Tensor]) -> Any:
        """What the module returns for a batch, of any size that it takes."""
        call = forward_call(self.module, batch, self._training.forward_kwargs)
        with autocast(self._device.type, self._precision):
            return call_user_code("the model's forward", lambda: self.module(**call.arguments(batch)))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Any:
        """What the user's loss returns."""
        with autocast(self._device.type, self._precision):
            return call_user_code("Training.loss", self._training.loss, output, dict(batch))

    def _micro_batch(
        self, step: int, i: int, loss_scale: float, found: dict[str, list[Tensor]], again: set[str]
    ) -> tuple[float, float]:
        """Adds to `found` the buffers as forward leaves them, and to `again` which ones backward changes:
        checkpointed layers run twice, and count once."""
        batch = {name: value.to(self._device) for name, value in self._batches.micro_batch(step, i).items()}
        with preserved_randomness():
            seed_everything(seed64("eager", self._seed, step, i))
            loss: Any = self.loss(self.output(batch), batch)
        total, weight = cast(tuple[Any, Any], loss) if isinstance(loss, tuple) else (loss, 1.0)
        buffers = dict(self.module.named_buffers())
        for name, buffer in buffers.items():
            found.setdefault(name, []).append(buffer.detach().clone())
        call_user_code("the loss's backward", lambda: (total * loss_scale).backward())
        again |= {name for name, buffer in buffers.items() if not torch.equal(buffer, found[name][-1])}
        return float(total.detach()), float(weight)

    def _load_initial(self, traced: TracedModel) -> None:
        with torch.no_grad():
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                if name not in traced.tensors or traced.tensors[name].shape != tensor.shape:
                    raise UserCodeError(
                        f"Training.model: it builds another model each time: {name!r} is "
                        f"{list(tensor.shape)} now and was "
                        f"{list(traced.tensors[name].shape) if name in traced.tensors else 'not there'}"
                    )
                tensor.copy_(traced.initial(name))

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Put `values` into the buffers of their names."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


def eager_step(
    training: Training,
    traced: TracedModel,
    batches: Batches,
    *,
    step: int = 0,
    seed: int = 0,
    precision: Precision = "fp32",
    loss_scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> EagerResult:
    """One step of the user's module from the initial weights of `traced`; `seed` is that of the trace."""
    model = EagerModel(training, traced, batches, seed=seed, precision=precision, device=device)
    return model.step(step, loss_scale)


def run_eager(
    training: Training,
    traced: TracedModel,
    batches: Batches,
    *,
    steps: int,
    seed: int = 0,
    precision: Precision = "fp32",
    loss_scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[list[float], dict[str, Tensor]]:
    """(loss of each step, weights and buffers by name) of training the user's module with its own
    optimizer."""
    model = EagerModel(training, traced, batches, seed=seed, precision=precision, device=device)
    losses: list[float] = []
    for step in range(steps):
        result = model.step(step, loss_scale)
        model.apply(step, result)
        losses.append(result.loss)
    return losses, model.state()


def _after(initial: Mapping[str, Tensor], name: str, values: list[Tensor]) -> Tensor:
    before = initial.get(name)
    if before is not None and all(torch.equal(value, before) for value in values):
        return before
    return combine(values)
