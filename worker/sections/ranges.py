"""The sections that one worker hosts, and the forward and backward of its share of a micro-batch's path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...model.errors import RecipeMismatch
from ...model.partition.partition import Sections
from ...model.training import Training
from ...pipeline.plan import Path
from .loss_scale import LossScale
from .runtime import Piece, Saved, SectionRuntime, WeightsLater

WHOLE = Path((), ())  # of a micro-batch that adds the contributions of all sections

Accumulate = Callable[[int, str, Tensor], None]
"""Called with (section, parameter name, one micro-batch's gradient)."""


def configure_torch(threads: int, numerics: Literal["exact", "fast"]) -> None:
    """Set the torch options that all trainers of a job share. With `exact`, torch raises an error naming any
    operation without a deterministic algorithm. cuBLAS needs no CUBLAS_WORKSPACE_CONFIG for that: torch gives
    it a workspace for each handle and stream (pytorch/pytorch#161749)."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(numerics == "exact")
    deterministic: Any = torch.utils.deterministic  # a module that holds a property
    deterministic.fill_uninitialized_memory = False  # it costs time; nothing reads unfilled memory
    torch.backends.cudnn.benchmark = False


def pick_device(kind: str) -> torch.device:
    """The device of this kind. Raises `RecipeMismatch` if there is none."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise RecipeMismatch("device_kind: the recipe says cuda, and torch finds no CUDA device here")
    return torch.device(kind)


@dataclass(slots=True)
class _Kept:
    """A micro-batch between its forward and its backward on this worker.

    No gradient reaches a section before `first`, with which a recomputation begins, on `inputs`.
    """

    step: int
    span: tuple[int, int]
    first: int
    path: Path
    inputs: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    saved: dict[int, Saved] = field(default_factory=dict)
    weights: list[tuple[int, WeightsLater]] = field(default_factory=list)
    """Of each section whose inputs' gradients were computed: what computes those of its parameters."""


class RangeOutput(NamedTuple):
    """`values`: tensors that cross after the range, as in `Sections.outputs_of`; empty at the end."""

    values: dict[str, Tensor]
    piece: Piece | None
    updates: dict[str, Tensor]  # new values of these sections' buffers from this micro-batch


class RangeRuntime:
    """The sections that one worker hosts. They are independent objects in `sections`, which morphs add and
    drop."""

    def __init__(
        self, chain: Sections, training: Training, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.chain = chain
        self._relayed = chain.relayed
        self._frozen = chain.frozen
        self.sections: dict[int, SectionRuntime] = {}
        self._training = training
        self._seed = seed
        self.device = torch.device(device)
        self.optimizer_on_host = False  # of the sections to come as well; see `place_optimizers`
        self._kept: dict[tuple[int, int], _Kept] = {}

    def host(self, index: int, *, initialise: bool = True) -> SectionRuntime:
        """Add section `index`, with initial weights or (False) zeros to load into; keeps a hosted one."""
        if index not in self.sections:
            self.sections[index] = self._make(index, initialise)
        return self.sections[index]

    def place_optimizers(self, *, on_host: bool) -> None:
        """Keep optimizers and their state in host memory, or on the device, now and for sections to come."""
        self.optimizer_on_host = on_host
        for index, section in self.sections.items():
            if section.optimizer_on_host != on_host:
                moved = self._make(index, initialise=False)
                moved.load_state(*section.state())
                self.sections[index] = moved

    def _make(self, index: int, initialise: bool) -> SectionRuntime:
        return SectionRuntime(
            self.chain,
            index,
            self._training,
            self._seed,
            self.device,
            initialise=initialise,
            optimizer_on_host=self.optimizer_on_host,
        )

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of the next step, equal in all sections; None without fp16."""
        return next((section.loss_scale for section in self.sections.values()), None)

    def drop(self, index: int) -> None:
        del self.sections[index]

    def needs_batch(self, start: int, stop: int) -> bool:
        """Whether running these sections takes entries of the batch."""
        chain = self.chain
        return stop == chain.num_sections or any(chain.sections[index].batch for index in range(start, stop))

    def forward(
        self,
        step: int,
        micro_batch: int,
        start: int,
        stop: int,
        inputs: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        keep: bool,
        path: Path = WHOLE,
    ) -> RangeOutput:
        """Run sections start..stop-1 on `inputs` (the values of `chain.inputs_of(start)`).

        `keep=False` keeps only the inputs of the first section that a gradient reaches; then `recompute` must
        precede `backward`. Nothing is kept of sections that no gradient reaches. `path` says which sections
        add to the sums.
        """
        first = min(max(start, self._frozen, path.open_from), stop)
        frozen = self._run(step, micro_batch, range(start, first), inputs, batch, None)
        kept = _Kept(step, (start, stop), first, path, {}, {})
        self._kept[micro_batch, start] = kept
        if not keep and first < stop:
            kept.inputs, kept.batch = frozen.values, batch if self.needs_batch(first, stop) else {}
        saved = kept.saved if keep else None
        output = self._run(step, micro_batch, range(first, stop), frozen.values, batch, saved)
        piece = frozen.piece if output.piece is None else output.piece
        return output._replace(piece=piece, updates=frozen.updates | output.updates)

    def recompute(self, micro_batch: int, start: int) -> None:
        """Run the forward again from the kept inputs, with the same random numbers, and keep its graphs. Its
        updates of buffers are discarded, since they equal those of the forward."""
        kept = self._kept[micro_batch, start]
        sections = range(kept.first, kept.span[1])
        self._run(kept.step, micro_batch, sections, kept.inputs, kept.batch, kept.saved)

    def backward(
        self,
        micro_batch: int,
        start: int,
        gradients: Mapping[str, Tensor],
        accumulate: Accumulate,
        section_done: Callable[[int], None] | None = None,
    ) -> dict[str, Tensor]:
        """Run the backward: from the gradients of `outputs_of(stop)` to those of `inputs_of(start)`, where
        they need one.

        Passes each parameter's gradient to `accumulate` as soon as its section is done, then calls
        `section_done`, and drops the micro-batch. Gradients of a value that several sections use are added in
        descending section order.
        """
        kept = self._kept.pop((micro_batch, start))

        def one(section: SectionRuntime, saved: Saved, own: dict[str, Tensor]) -> dict[str, Tensor]:
            if not kept.path.adds(section.info.index):
                return section.input_gradients(saved, own)[0]
            inputs, parameters = section.backward(saved, own)
            _hand_in(section.info.index, parameters, accumulate, section_done)
            return inputs

        return self._backwards(micro_batch, kept, gradients, one, section_done)

    def input_gradients(
        self, micro_batch: int, start: int, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The first half of `backward`: the gradients of `inputs_of(start)`. `weight_gradients` must follow,
        or `discard`."""
        kept = self._kept[micro_batch, start]

        def one(section: SectionRuntime, saved: Saved, own: dict[str, Tensor]) -> dict[str, Tensor]:
            inputs, weights = section.input_gradients(saved, own)
            if kept.path.adds(section.info.index):
                kept.weights.append((section.info.index, weights))
            return inputs

        return self._backwards(micro_batch, kept, gradients, one, None)

    def weight_gradients(
        self,
        micro_batch: int,
        start: int,
        accumulate: Accumulate,
        section_done: Callable[[int], None] | None = None,
    ) -> None:
        """The second half of `backward`: the parameters' gradients, from what `input_gradients` has kept."""
        kept = self._kept.pop((micro_batch, start))
        weights = dict(kept.weights)
        kept.weights.clear()
        for index in filter(kept.path.adds, reversed(range(*kept.span))):
            compute = weights.pop(index, None)
            _hand_in(index, {} if compute is None else compute(), accumulate, section_done)
            del compute  # it holds the section's graph

    def _backwards(
        self,
        micro_batch: int,
        kept: _Kept,
        gradients: Mapping[str, Tensor],
        one: Callable[[SectionRuntime, Saved, dict[str, Tensor]], dict[str, Tensor]],
        section_done: Callable[[int], None] | None,
    ) -> dict[str, Tensor]:
        """Run `one`, which gives the gradients of a section's inputs, for each section that a gradient
        reaches, descending."""
        flowing = dict(gradients)
        for index in reversed(range(*kept.span)):
            if index < kept.first:
                if section_done is not None and kept.path.adds(index):
                    section_done(index)
                continue
            section = self.sections[index]
            assert index in kept.saved, f"micro-batch {micro_batch}: recompute comes before backward"
            own = {name: flowing.pop(name) for name in section.info.outputs if name in flowing}
            for name, gradient in one(section, kept.saved.pop(index), own).items():
                flowing[name] = flowing[name] + gradient if name in flowing else gradient
        return flowing  # gradients of the sections' own outputs were removed; inputs' and relayed ones remain

    def discard(self) -> None:
        """Drop all micro-batches in flight (an abandoned attempt)."""
        self._kept.clear()

    def _run(
        self,
        step: int,
        micro_batch: int,
        sections: Iterable[int],
        values: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        saved: dict[int, Saved] | None,
    ) -> RangeOutput:
        """Run sections; with `saved`, keep there what the backward needs."""
        values = dict(values)
        updates: dict[str, Tensor] = {}
        piece: Piece | None = None
        for index in sections:
            output = self.sections[index].forward(step, micro_batch, values, batch)
            relayed = {name: values[name] for name in self._relayed[index]}
            values = relayed | output.values
            updates |= output.updates
            piece = output.piece
            if saved is not None:
                saved[index] = output.saved
            del output  # free what is not kept before the next section runs
        return RangeOutput(values, piece, updates)


def _hand_in(
    index: int,
    parameters: dict[str, Tensor],
    accumulate: Accumulate,
    section_done: Callable[[int], None] | None,
) -> None:
    """Pass on a section's gradients, and drop them before the next section allocates its own."""
    for name, gradient in parameters.items():
        accumulate(index, name, gradient)
    parameters.clear()
    if section_done is not None:
        section_done(index)
