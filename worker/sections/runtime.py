"""Sections on a device: each its own autograd graph, so that a gradient has the same bits on any partition.

A section's inputs are detached leaves, also inside a worker's range and when one worker hosts everything.
Values and gradients between sections are made contiguous and aligned, so that kernels see the same memory
layout whether a tensor was computed here or received; the graph gets that of the trace (`laid_out`). Forward
always records autograd, even if it will be recomputed: otherwise torch might choose other kernels the second
time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...model.errors import UserCodeError
from ...model.partition.constant_folding import fold
from ...model.partition.partition import Section, Sections
from ...model.precision import Precision, autocast
from ...model.seeds import seed64
from ...model.torch_private.pytree import tree_unflatten
from ...model.tracing.layouts import laid_out, memory_order
from ...model.training import (
    Training,
    call_user_code,
    raised_by_user,
    refuse_metric,
    sum_and_weight,
    user_error,
)
from . import engine, halves
from .loss_scale import LossScale
from .lr import LearningRates
from .memory_format import aligned, canonical, on_device, seed_device
from .optimizers import OwnSettings, make_optimizer
from .state import Scalar, is_reproducible, load_section_state, section_state


@dataclass(slots=True)
class Saved:
    """What a section's backward needs from its forward, of `call` = (step, micro-batch): `leaves`, the inputs
    that need a gradient, and `results`, the outputs that receive one."""

    call: tuple[int, int]
    leaves: dict[str, Tensor]
    results: dict[str, Tensor]
    loss: Tensor | None


class Piece(NamedTuple):
    """One micro-batch's loss sum and weight; sums are added in the order of the micro-batches, and divided by
    the total weight."""

    loss_sum: float
    weight: float


class SectionOutput(NamedTuple):
    values: dict[str, Tensor]
    piece: Piece | None  # of the last section only
    saved: Saved
    updates: dict[str, Tensor]  # new values of `info.updates`, from the buffers' values at the step's start


WeightsLater = Callable[[], dict[str, Tensor]]
"""Computes the gradients of a section's parameters, by name; call it once. It holds the graph."""


class SectionRuntime:
    """One section on one device: parameters, buffers, optimizer, forward and backward."""

    def __init__(
        self,
        sections: Sections,
        index: int,
        training: Training,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        initialise: bool = True,
        optimizer_on_host: bool = False,
    ) -> None:
        """`initialise=False` leaves parameters and persistent buffers as zeros, to be filled by `load_state`.
        `optimizer_on_host`: the optimizer updates copies of the weights in host memory, with its state there,
        and the result is copied to the device."""
        self.info: Section = sections.sections[index]
        self.scales: dict[str, float] = {}
        """`numerics: exact`: the scale of each trainable parameter for the next step; 0 or absent: not
        known."""
        self.loss_scale = LossScale() if sections.traced.precision == "fp16" else None
        """With fp16, the loss scale of the next step; equal in all sections."""
        self._training = training
        self._seed = seed
        self._device = torch.device(device)
        self._sections = sections
        self._last = index == sections.num_sections - 1
        self._module = on_device(sections.modules[index], self._device)
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(self._make(name, initialise), requires_grad=name in self.info.trainable)
            for name in self.info.parameters
        }
        persistent = sections.persistent_buffers
        self.buffers: dict[str, Tensor] = {
            name: self._make(name, initialise or name not in persistent) for name in self.info.buffers
        }
        self._constants = [self._make(name, True) for name in self.info.constants]
        self._stored = [*self.parameters.values(), *self.buffers.values(), *self._constants]
        names = [*self.parameters, *self.buffers, *self.info.constants]
        orders = [memory_order(sections.traced.tensors[name]) for name in names]
        self._orders = {position: order for position, order in enumerate(orders) if order is not None}
        """Of the stored tensors that the trace saw in another layout; usually none."""
        precision: Precision = sections.traced.precision
        self._module, self.folded = fold(self._module, self._unchanging(), self._device, precision)
        # Looked up once: after a long operation caches are cold, and lookups cost several times more.
        self.trainable = {name: self.parameters[name] for name in self.info.trainable}
        self._autocast = autocast(self._device.type, precision)
        self._call = self._module.forward  # without __call__, since a section's graph has no hooks
        crossing = {value.name: value for values in sections.crossing for value in values}
        self._inputs = [(name, crossing[name].needs_grad, crossing[name].order) for name in self.info.inputs]
        self._outputs = [(name, crossing[name].torch_dtype) for name in self.info.outputs]
        self.optimizer_on_host = optimizer_on_host
        self._owned = self._copied_to_host() if optimizer_on_host else self.trainable
        """The tensors that the optimizer updates: the parameters, or their copies."""
        self.optimizer = make_optimizer(training, list(self._owned.items()))
        self._settings = OwnSettings(self.optimizer, index, scheduled=training.schedule is not None)
        self.split: halves.Split | None = None
        """Where a backward is cut in two; None if it is not, or was not looked at yet."""
        self._looked_for_split = False
        self._rates = LearningRates(self.optimizer, training.schedule) if self.optimizer else None

    @property
    def operations(self) -> list[str]:
        """The operations that run for every micro-batch, in order."""
        return [str(node.target) for node in self._module.graph.nodes if node.op == "call_function"]

    def forward(
        self, step: int, micro_batch: int, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]
    ) -> SectionOutput:
        """Run the section on detached `values` (those of `info.inputs`); random numbers are seeded by (seed,
        step, micro-batch, section). `batch` is needed if `info.batch` names entries, and by the loss."""
        if not torch.is_grad_enabled():  # asked first: the context costs more than all else here
            with torch.enable_grad():
                return self.forward(step, micro_batch, values, batch)
        seed_device(self._device, seed64("section", self._seed, step, micro_batch, self.info.index))
        arguments: list[Tensor] = self._stored.copy()
        for position, order in self._orders.items():
            arguments[position] = laid_out(arguments[position], order)
        for name in self.info.batch:
            arguments.append(aligned(batch[name].to(self._device)))
        leaves: dict[str, Tensor] = {}
        for name, needs_grad, order in self._inputs:
            value = canonical(values[name].detach().to(self._device))
            if needs_grad:
                leaves[name] = value.requires_grad_()
                # No leaf: of leaves autocast keeps the cast, and so their gradients would be added in bf16.
                value = value.view_as(value)
            arguments.append(laid_out(value, order))
        arguments += self.folded
        with self._autocast:
            try:
                returned: list[Any] = list(self._call(*arguments))
            except Exception as error:
                if raised_by_user(error):
                    raise user_error("the model's forward", error) from error
                raise
            own, updates = self._without_updates(returned)
            if self._last:
                return self._finish(own, (step, micro_batch), batch, leaves, updates)
            results: dict[str, Tensor] = {}
            outputs: dict[str, Tensor] = {}
            for (name, dtype), value in zip(self._outputs, own, strict=True):
                result = value.to(dtype)  # the traced type, on any device
                outputs[name] = canonical(result.detach())
                if result.requires_grad:
                    results[name] = result
        return SectionOutput(outputs, None, Saved((step, micro_batch), leaves, results, None), updates)

    def backward(
        self, saved: Saved, gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(gradients of `info.inputs` that need one, gradients of parameters), by name. `gradients`: those of
        `info.outputs`; with fp16 all are of the loss times `loss_scale`. An input without gradient gets
        zeros; a parameter without gradient is left out."""
        roots, seeds = self._seeded(saved, gradients)
        leaves = saved.leaves
        wanted = [*leaves.values(), *self.trainable.values()]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if roots and wanted:
            # A custom function may draw; one that does is not in a backward in halves (`halves.find_split`).
            seed_device(self._device, seed64("backward", self._seed, *saved.call, self.info.index))
            with _users_backward():
                found = engine.gradients(roots, seeds, wanted)
        own = zip(self.trainable, found[len(leaves) :], strict=True)
        return _of_inputs(leaves, found), {name: value for name, value in own if value is not None}

    def input_gradients(
        self, saved: Saved, gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], WeightsLater]:
        """The first half of `backward`, for the inputs, and what the second one takes. The bits of both are
        those of the whole. `saved` is used up."""
        roots, seeds = self._seeded(saved, gradients)
        leaves = saved.leaves
        if not roots or not leaves:
            return _of_inputs(leaves, [None] * len(leaves)), lambda: self.backward(saved, gradients)[1]
        split = self._split_of(roots, leaves.values(), may_differ=saved.loss is not None)
        if split is None:
            inputs, parameters = self.backward(saved, gradients)
            return inputs, lambda: parameters
        with _users_backward():
            found, pending = halves.input_gradients(split, roots, seeds, list(leaves.values()))
        return _of_inputs(leaves, found), partial(self._weight_gradients, pending)

    def _weight_gradients(self, pending: halves.PendingWeights) -> dict[str, Tensor]:
        with _users_backward():
            return halves.weight_gradients(pending, self.trainable)

    def _split_of(
        self, roots: Sequence[Tensor], leaves: Iterable[Tensor], *, may_differ: bool
    ) -> halves.Split | None:
        """Where a graph of the section is cut; None if it cannot be. Those of a traced section are alike, so
        that the first tells; the user's loss may compute each micro-batch's another way."""
        if may_differ or not self._looked_for_split:
            self._looked_for_split = True
            try:
                self.split = halves.find_split(roots, leaves, self.trainable)
            except halves.CannotSplit:
                self.split = None
        return self.split

    def _seeded(self, saved: Saved, gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The roots of the graph, and their gradients."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        if saved.loss is not None:
            scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
            roots, seeds = [saved.loss], [torch.full_like(saved.loss, scale)]
        for name, result in saved.results.items():
            roots.append(result)
            seeds.append(aligned(gradients[name]))
        return roots, seeds

    def set_lr(self, step: int) -> None:
        """Set each group's learning rate for `step`: its initial one times the schedule's factor."""
        if self._rates is not None:
            self._rates.set(step)

    def apply(
        self,
        step: int,
        gradients: Mapping[str, Tensor],
        coefficient: Tensor | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Update the weights with finalised gradients (times the clip coefficient), and the buffers with
        `statistics`; keeps no gradient."""
        for name, value in (statistics or {}).items():
            if name in self.buffers:
                self.buffers[name].copy_(value)
        if self.optimizer is None:
            return
        self.set_lr(step)
        seed_device(self._device, seed64("optimizer", self._seed, step, self.info.index))
        for name, owned in self._owned.items():
            # An optimizer may write into its gradients, which other sections of this worker have too.
            shared = coefficient is None and name in self._sections.shared
            gradient = gradients[name].to(owned.device, owned.dtype, copy=shared)
            owned.grad = gradient if coefficient is None else gradient * coefficient.to(owned.device)
        call_user_code("optimizer.step()", self.optimizer.step)
        for owned in self._owned.values():
            owned.grad = None
        self._to_device()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """The section's complete state: (tensors, scalars), by name; see `section_state`."""
        tensors, scalars = section_state(
            self.parameters | self._owned, self._kept_buffers(), self.optimizer, self.scales, self.loss_scale
        )
        group_tensors, group_scalars = self._settings.state()
        return tensors | group_tensors, scalars | group_scalars

    def load_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Restore what `state` gave, here or elsewhere. Raises `RecipeMismatch` naming what does not fit."""
        ours = self._settings.load(tensors, scalars)
        self.scales, self.loss_scale = load_section_state(
            self.parameters | self._owned,
            self._kept_buffers(),
            self.optimizer,
            self.loss_scale,
            {name: tensor for name, tensor in tensors.items() if name not in ours},
            {name: value for name, value in scalars.items() if name not in ours},
        )
        self._to_device()

    def _copied_to_host(self) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(parameter.detach().to("cpu", copy=True))
            for name, parameter in self.trainable.items()
        }

    def _to_device(self) -> None:
        """Copy updated weights to the device."""
        if self.optimizer_on_host:
            with torch.no_grad():
                for name, owned in self._owned.items():
                    self.parameters[name].copy_(owned)

    def fixed_bytes(self) -> int:
        """Bytes of buffers and constants on the device that are not part of the state."""
        return sum(tensor.nbytes for tensor in self._fixed())

    def _fixed(self) -> list[Tensor]:
        kept = self._kept_buffers().values()
        rest = [buffer for buffer in self.buffers.values() if all(buffer is not other for other in kept)]
        return [*rest, *self._constants, *self.folded]

    def held(self) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """All that has the same bits on every host of the section: its state without attributes of the
        optimizer, and tensors that are not part of the state. The tensors are live."""
        state_tensors, state_scalars = self.state()
        tensors = {name: tensor for name, tensor in state_tensors.items() if is_reproducible(name)}
        scalars = {name: value for name, value in state_scalars.items() if is_reproducible(name)}
        tensors |= {f"fixed/{number}": tensor for number, tensor in enumerate(self._fixed())}
        if self.optimizer_on_host:
            tensors |= {f"device/{name}": value.detach() for name, value in self.trainable.items()}
        return tensors, scalars

    def _kept_buffers(self) -> dict[str, Tensor]:
        """The state's buffers under their names in it: persistent ones, and those that change."""
        kept: dict[str, Tensor] = {}
        for name, buffer in self.buffers.items():
            if name in self._sections.persistent_buffers:
                kept[f"buffers/{name}"] = buffer
            elif name in self._sections.updated_buffers:
                kept[f"statistics/{name}"] = buffer
        return kept

    def _unchanging(self) -> dict[int, Tensor]:
        """{position among the section's arguments: buffer or constant that never changes}."""
        state = self._sections.persistent_buffers | set(self._sections.traced.updates)
        names = [*self.parameters, *self.buffers, *self.info.constants]
        return {
            position: laid_out(value, self._orders.get(position))
            for position, (name, value) in enumerate(zip(names, self._stored, strict=True))
            if position >= len(self.parameters) and name not in state
        }

    def _make(self, name: str, initialise: bool) -> Tensor:
        traced = self._sections.traced
        if initialise:
            return traced.initial(name).to(self._device)
        fake = traced.tensors[name]
        return torch.zeros(fake.shape, dtype=fake.dtype, device=self._device)

    def _without_updates(self, returned: list[Any]) -> tuple[list[Any], dict[str, Tensor]]:
        """(the graph's results without new values of buffers, {buffer: its new value})."""
        if not self.info.updates:
            return returned, {}
        own = len(returned) - len(self.info.updates)
        new = zip(self.info.updates, returned[own:], strict=True)
        return returned[:own], {name: value.detach() for name, value in new}

    def _finish(
        self,
        results: list[Any],
        call: tuple[int, int],
        batch: Mapping[str, Tensor],
        leaves: dict[str, Tensor],
        updates: dict[str, Tensor],
    ) -> SectionOutput:
        output = tree_unflatten(results, self._sections.traced.out_spec)
        # Its own: the user's loss may write into them, and runs once more where this is recomputed.
        moved = {name: entry.to(self._device, copy=True) for name, entry in batch.items()}
        loss: Any = call_user_code("Training.loss", self._training.loss, output, moved)
        total, weight = sum_and_weight(loss)
        refuse_metric(weight)
        if not isinstance(total, Tensor) or total.numel() != 1:
            got = f"a tensor of {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise UserCodeError(
                f"Training.loss: expected a scalar tensor (a mean) or (sum, weight), got {got}"
            )
        piece = Piece(float(total.detach()), float(weight))
        saved = Saved(call, leaves, {}, total if total.requires_grad else None)
        return SectionOutput({}, piece, saved, updates)


def _of_inputs(leaves: Mapping[str, Tensor], found: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(leaf) if gradient is None else canonical(gradient)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=False)
    }


@contextmanager
def _users_backward() -> Generator[None]:
    """Raises what user code raises in a backward as `UserCodeError`."""
    try:
        yield
    except Exception as error:
        if raised_by_user(error):
            raise user_error("the model's backward", error) from error
        raise
