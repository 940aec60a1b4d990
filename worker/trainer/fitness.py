"""Hashes what this machine's kernels compute for a job's own sections.

Kernels sum in a different order with different vector instructions, so two kinds of processors may train one
graph to different weights. With `numerics: exact` only workers with the same hash train together. It covers
the bits of two steps of each kind of section: initial weights, forward, backward, norms, and the optimizer's
update; with the job's own micro-batch size, precision and number of threads, on its own device.

A job that starts from another's checkpoint may have another seed, other data or another optimizer and still
need the same kernels: `kernels_hash` does not depend on those.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW

from ...model.errors import UserCodeError
from ...model.partition.partition import CutTensor, Sections
from ...model.seeds import preserved_randomness, seed64
from ...model.tracing.graph_text import digest, graph_lines
from ...model.training import Training
from ..sections.grad_sums import parameter_norm
from ..sections.loss_scale import LossScale
from ..sections.runtime import SectionRuntime

log = logging.getLogger("makara.trainer")
_STEPS = 2  # weights that begin as zeros show nothing in the first
_SEED = 0


def bits_hash(
    chain: Sections,
    training: Training,
    batch: Mapping[str, Tensor],
    seed: int,
    device: torch.device | str = "cpu",
) -> str:
    """The hash, SHA-256 in hexadecimal. `batch` is one micro-batch. One section at a time is in memory."""
    with preserved_randomness():
        digests = [
            shown
            for index in kinds(chain)
            for shown in _shown(_steps(chain, index, training, batch, seed, torch.device(device)))
        ]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def kernels_hash(
    chain: Sections,
    training: Training,
    batch: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> str:
    """Like `bits_hash`, but independent of the job's seed, data, schedule and optimizer: the values of
    `batch` are synthetic, and the update is AdamW's."""
    plain = replace(training, optimizer=partial(AdamW, lr=1e-3), schedule=None)
    made_up = {name: _made_up(name, tensor.shape, tensor.dtype, _SEED) for name, tensor in batch.items()}
    return bits_hash(chain, plain, made_up, _SEED, device)


def _shown(tensors: Iterator[Tensor]) -> list[str]:
    """The digests of a section's tensors.

    Its inputs are synthetic, and an operation may refuse them (probabilities, a matrix to invert). It does so
    on every machine, so the digests before it and the kind of the error stand for the rest.
    """
    digests: list[str] = []
    try:
        digests.extend(digest(_comparable(tensor)) for tensor in tensors)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, UserCodeError, ValueError) as error:
        log.warning("bits: a section refuses made-up inputs, so less of it is compared: %s", error)
        digests.append(type(error).__name__)
    return digests


def kinds(chain: Sections) -> list[int]:
    """The first section of each kind; sections of one kind run the same operations on the same shapes."""
    first: dict[str, int] = {}
    for info, module in zip(chain.sections, chain.modules, strict=True):
        tensors = chain.traced.tensors
        own = [*info.parameters, *info.buffers, *info.constants]
        shapes = [(tensors[name].dtype, tuple(tensors[name].shape), name in info.trainable) for name in own]
        values = [(value.dtype, value.shape, value.needs_grad) for value in _inputs(chain, info.index)]
        last = info.index == chain.num_sections - 1
        kind = "\n".join([f"{last} {info.batch} {shapes} {values}", *graph_lines(module.graph, module, {})])
        first.setdefault(kind, info.index)
    return list(first.values())


def _steps(
    chain: Sections,
    index: int,
    training: Training,
    batch: Mapping[str, Tensor],
    seed: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield all tensors that two steps of section `index` compute, and its state after them."""
    section = SectionRuntime(chain, index, training, seed, device)
    if section.loss_scale is not None:
        section.loss_scale = LossScale(1.0)  # overflows would hide differences
    values = {value.name: _filled(value, seed).to(device) for value in _inputs(chain, index)}
    outputs = [value for value in chain.outputs_of(index + 1) if value.name in section.info.outputs]
    seeds = {value.name: _filled(value, seed).to(device) for value in outputs if value.needs_grad}
    for step in range(_STEPS):
        output = section.forward(step, 0, values, batch)
        inputs, found = section.backward(output.saved, seeds)
        yield from (*output.values.values(), *inputs.values(), *found.values())
        if output.piece is not None:
            yield torch.tensor(output.piece.loss_sum, dtype=torch.float64)
        gradients = {name: torch.zeros_like(parameter) for name, parameter in section.trainable.items()}
        gradients |= found
        yield from (parameter_norm(gradient) for gradient in gradients.values())
        section.apply(step, gradients, statistics=output.updates)
    yield from section.state()[0].values()


def _inputs(chain: Sections, index: int) -> list[CutTensor]:
    known = {value.name: value for value in chain.inputs_of(index)}
    return [known[name] for name in chain.sections[index].inputs]


def _filled(value: CutTensor, seed: int) -> Tensor:
    return _made_up(value.name, value.shape, value.torch_dtype, seed)


def _made_up(name: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Multiples of 2^-20 between -1 and 1, computed from integers: the same bits on every machine."""
    if not dtype.is_floating_point:
        return torch.zeros(tuple(shape), dtype=dtype)  # an index or a mask: zero is in range
    generator = torch.Generator().manual_seed(seed64("fitness", seed, name))
    whole = torch.randint(-(1 << 20), 1 << 20, tuple(shape), generator=generator)
    return whole.double().div_(1 << 20).to(dtype)


def _comparable(tensor: Tensor) -> Tensor:
    """Replace NaN, whose sign differs between processors without meaning."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)
