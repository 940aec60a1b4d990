"""Pairs of neighbouring sections, each compared with the two joined, where no whole step is compared.

A cut must change no number. Where a model is too large for the comparison with the user's module, one pair of
each kind runs with its cut and without: on made-up values, forward and backward, with the same random
numbers. Kinds are pairs with equal graphs, shapes and types: a transformer of equal blocks has three to five.

One pair is in memory at a time. The kinds that stand for most pairs come first. A kind is left out, and the
report says so, if it would not fit into memory or into the time, or if the two joined refuse such values.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.data import Sample
from ...model.errors import UserCodeError
from ...model.partition.partition import CutTensor, Sections, split
from ...model.tracebacks import first_line
from ...model.tracing.graph_text import graph_lines
from ...model.training import Training
from ..sections.ranges import RangeRuntime
from .findings import Report, differences, noise_floor, some
from .losses import checked_loss
from .memory import Needs, refusal
from .random_numbers import FixedNumbers

_APART, _APART_IN_FEW_BITS = 1e-3, 0.1  # beyond rounding: found faults differ by the size of the gradient
_SEED = 11


def compare_neighbours(
    chain: Sections,
    training: Training,
    seed: int,
    batch: Sample,
    needs: Needs,
    report: Report,
    free_bytes: int | None,
    max_seconds: float | None,
) -> None:
    """Adds to `report` the pair that differs, and a note on how many kinds were compared and why not all.

    It takes `max_seconds` at most, beyond its last pair; memory as one step of two sections.
    """
    kinds = _kinds(chain)
    if not kinds:
        return
    seconds, total = needs.joined_seconds(), max(sum(chain.work), 1.0)
    ends = None if max_seconds is None else time.perf_counter() + max_seconds
    comparison = _Comparison(chain, checked_loss(training), seed, batch)
    left_out: Counter[str] = Counter()
    for first in kinds:
        share = (chain.work[first] + chain.work[first + 1]) / total
        if ends is not None and time.perf_counter() + seconds * share > ends:
            left_out[f"it would take longer than {max_seconds:g} s"] += 1
            continue
        if reason := refusal(needs.section_bytes(first) + needs.section_bytes(first + 1), free_bytes):
            left_out[reason] += 1
            continue
        try:
            joined, apart = comparison.joined(first), comparison.apart(first)
        except (UserCodeError, RuntimeError, ValueError, IndexError) as error:
            left_out[f"made-up values are refused ({first_line(error)})"] += 1
            continue
        if not joined.is_finite:
            left_out["made-up values give no finite numbers"] += 1
            continue
        _judge(chain, first, apart, joined, report)
    report.notes.append(
        f"{len(kinds) - left_out.total()} of {len(kinds)} kinds of neighbouring sections were compared with "
        "the two joined" + "".join(f"; {count} left out: {why}" for why, count in left_out.items())
    )


class _Results(NamedTuple):
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(value.isfinite().all()) for group in self for value in group.values())


def _judge(chain: Sections, first: int, apart: _Results, joined: _Results, report: Report) -> None:
    allowed = _APART if chain.traced.precision == "fp32" else _APART_IN_FEW_BITS
    found: dict[str, float] = {}
    for one, other in zip(apart, joined, strict=True):
        floor = noise_floor(value for value in other.values() if value.is_floating_point())
        found |= differences(one, other, floor)
    wrong = [name for name, value in found.items() if value > allowed]
    if wrong:
        report.find(
            "the model's backward",
            f"{some(wrong)} differ where the model is cut between sections {first} and {first + 1}: an "
            "operation there depends on the memory layout of a value or of its gradient",
            "If it is your own, let it take any layout (.contiguous()); else please report it. "
            "parallelism.num_sections: 1 trains the model right, and Training.cuts may put the cuts "
            "elsewhere",
        )


@dataclass(frozen=True, slots=True)
class _Comparison:
    chain: Sections
    training: Training
    seed: int
    batch: Sample

    def apart(self, first: int) -> _Results:
        """The results of sections `first` and `first + 1`."""
        return self._results(self.chain, first, first + 2)

    def joined(self, first: int) -> _Results:
        """The same without the cut between them."""
        cuts = [cut for place, cut in enumerate(self.chain.cuts) if place != first]
        return self._results(split(self.chain.traced, cuts), first, first + 1)

    def _results(self, chain: Sections, start: int, stop: int) -> _Results:
        """Outputs of sections start..stop-1, and gradients of their parameters and inputs; all that comes
        from outside follows from its name."""
        runtime = RangeRuntime(chain, self.training, self.seed)
        for index in range(start, stop):
            runtime.host(index)
        gradients: dict[str, Tensor] = {}

        def add(_section: int, name: str, gradient: Tensor) -> None:
            name = f"gradient of {name}"
            gradients[name] = gradients[name] + gradient if name in gradients else gradient

        with FixedNumbers():
            given = {value.name: _made_up(value) for value in chain.inputs_of(start)}
            output = runtime.forward(0, 0, start, stop, given, self.batch, keep=True)
            back = {value.name: _made_up(value) for value in chain.outputs_of(stop) if value.needs_grad}
            inputs = runtime.backward(0, start, back, add)
        outputs = {f"output {name}": value for name, value in output.values.items()}
        outputs |= {f"buffer {name}": value for name, value in output.updates.items()}
        if output.piece is not None:
            outputs["loss"] = torch.tensor([output.piece.loss_sum, output.piece.weight])
        gradients |= {f"gradient of input {name}": value for name, value in inputs.items()}
        return _Results(outputs, gradients)


def _kinds(chain: Sections) -> list[int]:
    """The first section of one pair of each kind; the kinds that stand for most pairs first."""
    texts = [_text(chain, index) for index in range(chain.num_sections)]
    pairs = list(itertools.pairwise(texts))
    counts = Counter(pairs)
    return sorted((pairs.index(pair) for pair in counts), key=lambda first: -counts[pairs[first]])


def _text(chain: Sections, index: int) -> str:
    """Equal for sections that compute alike: operations, and shapes and types of all that goes in."""
    section, module = chain.sections[index], chain.modules[index]
    held = (*section.parameters, *section.buffers, *section.constants)
    tensors = [
        (chain.traced.tensors[n].shape, chain.traced.tensors[n].dtype, n in section.trainable) for n in held
    ]
    crossing = {v.name: v for v in (*chain.inputs_of(index), *chain.outputs_of(index + 1))}
    values = [
        (v.shape, v.dtype, v.needs_grad, v.order)
        for name in (*section.inputs, *section.outputs)
        if (v := crossing.get(name)) is not None
    ]
    return str((tensors, values, graph_lines(module.graph, module, {})))


def _made_up(value: CutTensor) -> Tensor:
    """Random numbers that follow from the name, so that a pair and the two joined get the same."""
    if not value.torch_dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.torch_dtype)
    numbers = torch.Generator().manual_seed(_SEED + int(value.name.removeprefix("v")))
    return torch.randn(value.shape, generator=numbers).to(value.torch_dtype)
