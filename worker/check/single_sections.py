"""Sections run by themselves, one in memory at a time, where one step of the whole model is not run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ...model.data import Sample
from ...model.errors import UserCodeError
from ...model.partition.partition import Sections
from ...model.tracebacks import first_line
from ...model.training import Training
from ..sections.ranges import RangeRuntime
from .losses import NotTrained, checked_loss
from .memory import Needs, refusal


def run_sections(
    chain: Sections,
    training: Training,
    seed: int,
    batch: Sample,
    free_bytes: int | None,
    needs: Needs,
    first: int,
) -> tuple[str | None, str | None]:
    """Forward, backward of zeros and update of the sections from `first` on, each on what the one before
    gives, as far as each fits into memory (see `refusal`); the last, with the loss, in any case if it fits.

    Returns (what was run, in words; why the last was not). Raises the user's errors.
    """
    run = partial(_run, chain, checked_loss(training), seed, batch)
    num, last = chain.num_sections, chain.num_sections - 1
    values: Mapping[str, Tensor] | None = {} if first == 0 else None
    note = f"the first {last} of {num} sections were run one by one" if first < last else None
    for index in range(first, last):
        if why := refusal(needs.section_bytes(index), free_bytes):
            note = f"of {num} sections the first {index} were run one by one; section {index}: {why}"
            values = None
            break
        values = run(index, values or {})
    not_run = refusal(needs.section_bytes(last), free_bytes)
    if not_run is None and (values is not None or last == 0):
        run(last, values or {})
    elif not_run is None:
        _run_on_zeros(run, chain)
    return note, not_run


def _run_on_zeros(run: partial[dict[str, Tensor]], chain: Sections) -> None:
    last = chain.num_sections - 1
    taken = {value.name: torch.zeros(value.shape, dtype=value.torch_dtype) for value in chain.inputs_of(last)}
    try:
        run(last, taken)
    except (UserCodeError, RuntimeError) as error:
        if isinstance(error.__cause__, NotTrained):
            raise
        known = isinstance(error, UserCodeError)
        said = error.message if known else f"the last section: {type(error).__name__}: {first_line(error)}"
        raise UserCodeError(
            f"{said}\nThe last section was given zeros, made up for what the section before gives, as one "
            "step was not run. A model or a loss that refuses only zeros passes where the step is run",
            error.traceback if known else None,
        ) from error


def _run(
    chain: Sections, training: Training, seed: int, batch: Sample, index: int, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    runtime = RangeRuntime(chain, training, seed)
    section = runtime.host(index)
    gradients = {name: torch.zeros_like(parameter) for name, parameter in section.trainable.items()}

    def keep(_section: int, name: str, gradient: Tensor) -> None:
        gradients[name] = gradient

    output = runtime.forward(0, 0, index, index + 1, values, batch, keep=True)
    outside = chain.outputs_of(index + 1)
    seeds = {value.name: torch.zeros_like(output.values[value.name]) for value in outside if value.needs_grad}
    runtime.backward(0, index, seeds, keep)
    section.apply(0, gradients)
    return output.values
