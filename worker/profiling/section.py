"""One section, measured by itself on this machine: times and sizes for one micro-batch (Varuna §4.3).

It runs a few times on random values of the shapes that cross its cuts; `forward_s` is the paper's F_i,
`backward_s` its B_i, `input_s` and `weight_s` a backward in two operations. Nothing depends on P, D or N.
While a job trains, its workers' own times may scale them: `manager/core/rules/drift.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...model.data import Batches, open_dataset
from ...model.partition.partition import CutTensor, Sections
from ...model.training import Training
from ...protocol.survey import SectionRow
from ...simulator.calibration.assembly import timed_of
from ...simulator.calibration.measurements import HALVES
from ...simulator.calibration.statistics import summarise
from ..sections.grad_sums import GradientSum, Totals, new_sum
from ..sections.runtime import Saved, SectionOutput, SectionRuntime
from .footprint import Footprint, Footprints

LEAST_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all sections of a model are measured under. A section runs `LEAST_REPEATS` times (or `repeats`, if
    that is less), and up to `repeats` while `section_s` seconds are not over."""

    training: Training
    seed: int
    numerics: Literal["exact", "fast"]
    num_micro_batches: int  # it bounds the fixed point of the gradient sums
    device: torch.device | str = "cpu"
    repeats: int = 9
    section_s: float = 1.0


def measure_section(chain: Sections, index: int, conditions: Conditions) -> SectionRow:
    """Times and sizes of section `index`, which is in memory meanwhile, for one micro-batch."""
    began = time.perf_counter()
    training, device, m = conditions.training, conditions.device, chain.traced.microbatch_size
    batch = batch_of(training, conditions.seed, m)
    section = SectionRuntime(chain, index, training, conditions.seed, device)
    sums = new_sum(chain, section.info.trainable, conditions.num_micro_batches, conditions.numerics, device)
    sums.reset(dict.fromkeys(section.info.trainable, 1.0))
    passes = _Passes(chain, section, batch, sums, conditions)
    times = passes.times()
    if index < chain.frozen:  # whose backward is never run
        times |= {name: [0.0] for name in ("backward_s", *HALVES)}
    forward, backward = passes.footprints()
    coefficient = None if training.clip_grad_norm is None else torch.ones(())

    def end_step() -> None:
        gradients = sums.divided(1.0)  # what random values add up to may overflow
        Totals(gradients, overflowed=False).norms()
        section.apply(0, gradients, coefficient)

    times["optimizer_s"] = _seconds_of(end_step, conditions)
    finalise, update = _update_footprints(section, sums, coefficient, device)
    tensors, _ = section.state()
    saved_bytes = sum(tensor.nbytes for tensor in tensors.values())
    whole_batch = section.info.batch or index == chain.num_sections - 1
    return SectionRow(
        microbatch_size=m,
        section=index,
        times=timed_of({name: summarise(seconds) for name, seconds in times.items()}),
        sizes={
            "parameter_bytes": sum(parameter.nbytes for parameter in section.parameters.values()),
            "gradient_bytes": sums.buffer.nbytes,
            "state_bytes": saved_bytes + section.fixed_bytes() + sums.buffer.nbytes,
            "activation_bytes": max(0, forward.kept_bytes),
            "batch_bytes": sum(entry.nbytes for entry in batch.values()) if whole_batch else 0,
            "forward_peak_bytes": forward.peak_bytes,
            "backward_peak_bytes": backward.peak_bytes,
            "pending_bytes": passes.pending_bytes() if index >= chain.frozen else 0,
            "reduced_bytes": finalise.kept_bytes,
            "update_peak_bytes": max(finalise.peak_bytes - finalise.kept_bytes, update.peak_bytes),
            "snapshot_bytes": saved_bytes,
            "optimizer_bytes": sum(t.nbytes for name, t in tensors.items() if name.startswith("optimizer/")),
        },
        seconds=time.perf_counter() - began,
    )


def batch_of(training: Training, seed: int, m: int) -> dict[str, Tensor]:
    """A micro-batch of m samples."""
    dataset = open_dataset(training, seed)
    return Batches(dataset, seed, m, m).micro_batch(0, 0)


class _Passes:
    """A section's forward and backward on random values, again and again."""

    def __init__(
        self,
        chain: Sections,
        section: SectionRuntime,
        batch: dict[str, Tensor],
        sums: GradientSum,
        conditions: Conditions,
    ) -> None:
        self._section = section
        self._batch = batch
        self._sums = sums
        self._conditions = conditions
        info, device = section.info, conditions.device
        given = {value.name: value for value in chain.inputs_of(info.index)}
        self._values = {name: _random(given[name]).to(device) for name in info.inputs}
        crossing = [value for value in chain.outputs_of(info.index + 1) if value.name in info.outputs]
        self._gradients = {value.name: _random(value).to(device) for value in crossing if value.needs_grad}

    def times(self) -> dict[str, list[float]]:
        """Seconds of forwards, and of backwards, whole and in halves, with the adding of gradients."""
        device = self._conditions.device
        found: dict[str, list[float]] = {name: [] for name in ("forward_s", "backward_s", *HALVES)}
        for _ in repetitions(self._conditions):
            moments = [now(device)]
            output = self._forward()
            moments.append(now(device))
            self._backward(output.saved)
            moments.append(now(device))
            saved = self._forward().saved
            moments.append(now(device))
            _, weights = self._section.input_gradients(saved, self._gradients)
            moments.append(now(device))
            self._add(weights())
            moments.append(now(device))
            forward_s, backward_s, _, input_s, weight_s = (b - a for a, b in itertools.pairwise(moments))
            for name, seconds in zip(found, (forward_s, backward_s, input_s, weight_s), strict=True):
                found[name].append(seconds)
        return {name: seconds[1:] for name, seconds in found.items()}

    def pending_bytes(self) -> int:
        """Memory kept between I and W, beyond what the forward keeps."""
        with Footprints(self._conditions.device) as memory:
            saved = [self._forward().saved]
            memory.mark()
            _, weights = self._section.input_gradients(saved.pop(), self._gradients)
            memory.mark()
            weights()
        return max(0, memory.phases[1].kept_bytes)

    def footprints(self) -> tuple[Footprint, Footprint]:
        """Memory of the forward, which keeps what the backward needs, and of the backward."""
        with Footprints(self._conditions.device) as memory:
            kept = [self._forward().saved]
            memory.mark()
            self._backward(kept.pop())
            memory.mark()
        forward, backward = memory.phases
        return forward, backward

    def _forward(self) -> SectionOutput:
        return self._section.forward(0, 0, self._values, self._batch)

    def _backward(self, saved: Saved) -> None:
        self._add(self._section.backward(saved, self._gradients)[1])

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self._sums.add(name, gradient)


def repetitions(conditions: Conditions) -> Iterator[int]:
    """Counts the runs that `conditions` allow, and one before them that warms up."""
    yield 0
    until = time.perf_counter() + conditions.section_s
    for number in range(1, conditions.repeats + 1):
        if number > LEAST_REPEATS and time.perf_counter() >= until:
            return
        yield number


def _seconds_of(action: Callable[[], object], conditions: Conditions) -> list[float]:
    times: list[float] = []
    for _ in repetitions(conditions):
        started = now(conditions.device)
        action()
        times.append(now(conditions.device) - started)
    return times[1:]


def _update_footprints(
    section: SectionRuntime, sums: GradientSum, coefficient: Tensor | None, device: torch.device | str
) -> tuple[Footprint, Footprint]:
    """Memory of the end of a step, when the optimizer has its state: finalised gradients, their use."""
    with Footprints(device) as memory:
        gradients = sums.divided(1.0)
        memory.mark()
        section.apply(0, gradients, coefficient)
        memory.mark()
    finalise, update = memory.phases
    return finalise, update


def _random(value: CutTensor) -> Tensor:
    if value.torch_dtype.is_floating_point:
        return torch.randn(value.shape, dtype=value.torch_dtype)
    return torch.zeros(value.shape, dtype=value.torch_dtype)  # an index or a mask: zero is always in range


def now(device: torch.device | str) -> float:
    """Seconds of the process's clock, when the device has done all that was asked of it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
