"""The reference for "exact": one plain process that trains without any distribution or interruption.

It loops over the same sections and micro-batches, with the same public sums, clipping and optimizers. A run
of Makara with `numerics: exact` ends with the same bits, whatever its plans and whoever died on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from makara.model.data import Batches, open_dataset
from makara.model.errors import RecipeMismatch
from makara.model.partition.partition import Sections, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections.buffer_updates import RunningSum
from makara.worker.sections.grad_check import is_usable, total_norm
from makara.worker.sections.grad_sums import GradientSum, clip_coefficient, mean_loss, new_sum
from makara.worker.sections.ranges import RangeRuntime, configure_torch
from torch import Tensor
from whole_runtime import whole_runtime

OnStep = Callable[[int, float], None]


def native_device() -> torch.device:
    """What trainers that tests start would compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_reference(
    training: Training,
    *,
    microbatch_size: int,
    num_micro_batches: int,
    cuts: Sequence[int],
    steps: int,
    seed: int,
    numerics: Literal["exact", "fast"],
    precision: Precision = "fp32",
    graph_hash: str | None = None,
    threads: int = 1,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """(loss of each step, final state by name as `SectionRuntime.state` gives it, all sections together).

    Raises `RecipeMismatch` when the traced graph has another hash than `graph_hash`.
    """
    configure_torch(threads, numerics)
    traced = trace(training, microbatch_size, seed, precision)
    if graph_hash is not None and traced.graph_hash != graph_hash:
        raise RecipeMismatch(f"graph_hash: traced {traced.graph_hash}, the recipe says {graph_hash}")
    chain = split(traced, cuts)
    return run_sections(
        chain,
        training,
        microbatch_size=microbatch_size,
        num_micro_batches=num_micro_batches,
        steps=steps,
        seed=seed,
        numerics=numerics,
        device=device,
        on_step=on_step,
    )


def run_sections(
    chain: Sections,
    training: Training,
    *,
    microbatch_size: int,
    num_micro_batches: int,
    steps: int,
    seed: int,
    numerics: Literal["exact", "fast"],
    device: torch.device | str,
    on_step: OnStep | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """The same, of sections that this process has already, with torch configured."""
    traced = chain.traced
    dataset = open_dataset(training, seed)
    batches = Batches(dataset, seed, microbatch_size * num_micro_batches, microbatch_size)
    runtime = whole_runtime(chain, training, seed, device)
    sums = new_sum(chain, chain.trainable_names, num_micro_batches, numerics, device)
    changing = {name: traced.tensors[name] for name in chain.updated_buffers}
    running = RunningSum(changing, num_micro_batches, device)
    scales: dict[str, float] = {}
    losses: list[float] = []
    for step in range(steps):
        loss, scales = _step(runtime, batches, sums, running, scales, step, training.clip_grad_norm)
        losses.append(loss)
        if on_step is not None:
            on_step(step, loss)
    return losses, _state(runtime)


def _step(
    runtime: RangeRuntime,
    batches: Batches,
    sums: GradientSum,
    running: RunningSum,
    scales: dict[str, float],
    step: int,
    clip: float | None,
) -> tuple[float, dict[str, float]]:
    loss_scale = runtime.loss_scale
    while True:
        loss, total_weight = mean_loss(_attempt(runtime, batches, sums, running, scales, step))
        totals = sums.totals(total_weight if loss_scale is None else total_weight * loss_scale.scale)
        scales = dict(totals.scales)
        if not totals.overflowed or totals.non_finite:
            break  # else it is step 0, or a gradient outgrew its headroom
    found = totals.norms()
    names = runtime.chain.trainable_names
    norms = [found.get(name, 0.0) for name in names]
    usable = is_usable(step, names, norms, loss_scale)
    coefficient = None if clip is None else clip_coefficient(total_norm(norms), clip)
    for section in runtime.sections.values():
        if usable:
            section.apply(step, totals.gradients, coefficient, running.finalise())
        section.scales = {name: scales[name] for name in section.info.trainable if name in scales}
        section.loss_scale = None if loss_scale is None else loss_scale.after(not usable)
    return loss, scales


def _attempt(
    runtime: RangeRuntime,
    batches: Batches,
    sums: GradientSum,
    running: RunningSum,
    scales: dict[str, float],
    step: int,
) -> list[tuple[float, float]]:
    last = runtime.chain.num_sections
    sums.reset(scales)
    running.reset()
    pieces: list[tuple[float, float]] = []
    for i in range(batches.num_micro_batches):
        output = runtime.forward(step, i, 0, last, {}, batches.micro_batch(step, i), keep=True)
        runtime.backward(i, 0, {}, lambda _, name, gradient: sums.add(name, gradient))
        running.add(i, output.updates)
        assert output.piece is not None, "the last section computes the loss"
        pieces.append((output.piece.loss_sum, output.piece.weight))
    return pieces


def _state(runtime: RangeRuntime) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for index in sorted(runtime.sections):
        tensors, _ = runtime.sections[index].state()
        state |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    return state
