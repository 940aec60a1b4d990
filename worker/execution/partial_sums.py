"""A worker's sum of a bucket: gradients, and the new values of buffers, of some of a step's contributions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...checkpoint.tensors import pack, unpack
from ...model.partition.partition import Sections
from ...pipeline.contributions import Pairs, micro_batches_of
from ..sections.buffer_updates import RunningSum, running_bytes
from ..sections.grad_sums import GradientSum, new_sum
from .buckets import Bucket


@dataclass(frozen=True, slots=True)
class PartialSum:
    """`updated_by`: the section whose forward gives each buffer its new value."""

    gradients: GradientSum
    running: RunningSum
    updated_by: Mapping[str, int]

    def reset(self, scales: Mapping[str, float]) -> None:
        """Begin an attempt at a step, see `GradientSum.reset`."""
        self.gradients.reset(scales)
        self.running.reset()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def trim(self, pairs: Pairs) -> None:
        """Take the values of buffers out whose contributions are not in `pairs`."""
        every = (1 << self.running.num_micro_batches) - 1
        for name, section in self.updated_by.items():
            self.running.remove(micro_batches_of(every & ~pairs.of_section(section)), [name])

    def merge(self, other: PartialSum) -> None:
        self.gradients.merge(other.gradients)
        self.running.merge(other.running)

    def pack(self) -> bytes:
        """As a safetensors file, for a peer."""
        tensors = self._tensors()
        return pack({name: tensor.cpu() for name, tensor in tensors.items() if tensor.numel()})

    def load(self, payload: bytes) -> None:
        """Read a peer's `pack`. Raises `Corrupt`."""
        own = self._tensors()
        for name, tensor in unpack(payload)[0].items():
            own[name].copy_(tensor)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.gradients.tensors(), **self.running.tensors()}


class PartialSums:
    """Makes a model's partial sums."""

    def __init__(
        self,
        sections: Sections,
        num_micro_batches: int,
        numerics: Literal["exact", "fast"],
        device: torch.device | str = "cpu",
    ) -> None:
        self._sections = sections
        self.num_micro_batches = num_micro_batches
        self._numerics: Literal["exact", "fast"] = numerics
        self._device = device
        self._updated_by = {name: one.index for one in sections.sections for name in one.updates}

    def new(self, bucket: Bucket, scales: Mapping[str, float]) -> PartialSum:
        """An empty sum of one bucket."""
        tensors = self._sections.traced.tensors
        num = self.num_micro_batches
        made = PartialSum(
            new_sum(self._sections, bucket.names, num, self._numerics, self._device),
            RunningSum({name: tensors[name] for name in bucket.buffers}, num, self._device),
            {name: self._updated_by[name] for name in bucket.buffers},
        )
        made.reset(scales)
        return made

    def size_of(self, bucket: Bucket) -> int:
        """Bytes of a sum of the bucket, about."""
        tensors, width = self._sections.traced.tensors, 8 if self._numerics == "exact" else 4
        gradients = width * sum(tensors[name].numel() for name in bucket.names)
        return gradients + running_bytes({n: tensors[n] for n in bucket.buffers}, self.num_micro_batches)


def hash_of_scales(names: Sequence[str], scales: Mapping[str, float], loss_scale: float) -> str:
    """Equal if sums with these scales can be added. `loss_scale`: what the loss was multiplied by."""
    values = [loss_scale.hex(), *(scales.get(name, 0.0).hex() for name in names)]
    return hashlib.sha256(" ".join(values).encode()).hexdigest()[:16]
