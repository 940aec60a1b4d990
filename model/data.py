"""The samples of each micro-batch: positions of one endless stream, a pure function of (seed, position)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from .errors import UserCodeError
from .precision import dtype_name
from .seeds import preserved_randomness, seed64, seed_everything
from .training import Dataset, Training, call_user_code

Sample = dict[str, Tensor]
# Luby and Rackoff need four for a strong permutation; two more, as halves are small for short data.
_ROUNDS = 6
_MASK = (1 << 64) - 1


def copied(batch: Mapping[str, Tensor]) -> Sample:
    """For one call of the user's loss, which may write into its batch."""
    return {name: entry.clone() for name, entry in batch.items()}


def open_dataset(training: Training, seed: int) -> Dataset:
    """Call `Training.dataset` with Python's, NumPy's and torch's CPU generators seeded by (seed, "dataset"),
    so that a split or a permutation drawn in it is the same in every process. Restores the generators.

    Raises `UserCodeError` if it raises.
    """
    with preserved_randomness():
        seed_everything(seed64("dataset", seed))
        return call_user_code("Training.dataset", training.dataset)


class SampleOrder:
    """The order of the samples 0..length-1 in an epoch: `SampleOrder(...)[position]` is a sample's index.

    A keyed permutation in O(1) memory: a Feistel network on the next even power of two, with cycle walking
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 2). Raises `ValueError` when
    `length` is not positive.
    """

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        if length < 1:
            raise ValueError(f"length: {length} is not a positive number of samples")
        self._length = length
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [seed64("order", seed, epoch, number) for number in range(_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} is not in 0..{self._length - 1}")
        value = self._encrypt(position)
        while value >= self._length:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def least_sizes(global_batch_size: int) -> tuple[int, ...]:
    """The m to try first if the job does not fix it: 1; then, for batch norm, which needs several samples,
    the least other divisor of the global batch."""
    divisors = (m for m in range(2, global_batch_size + 1) if global_batch_size % m == 0)
    return 1, *islice(divisors, 1)


def sample_indices(seed: int, position: int, count: int, length: int) -> list[tuple[int, int]]:
    """(epoch, index) of the samples position..position+count-1 of the endless stream; may straddle
    epochs."""
    places = [divmod(place, length) for place in range(position, position + count)]
    orders = {epoch: SampleOrder(seed, epoch, length) for epoch in {epoch for epoch, _ in places}}
    return [(epoch, orders[epoch][offset]) for epoch, offset in places]


class Batches:
    """The micro-batches of a job. Micro-batch i of step s has the same samples on every worker, always."""

    def __init__(self, dataset: Dataset, seed: int, global_batch_size: int, m: int) -> None:
        """Raises `ValueError` when m does not divide the global batch, `UserCodeError` for invalid data."""
        if m < 1 or global_batch_size < 1 or global_batch_size % m:
            raise ValueError(f"microbatch_size: {m} does not divide global_batch_size {global_batch_size}")
        self._dataset = dataset
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._m = m
        _refuse_other_kinds(dataset)
        self._length = call_user_code("dataset: len()", len, dataset)
        if self._length < 1:
            raise UserCodeError("dataset: len() is 0; expected at least one sample")
        with preserved_randomness():
            self._template = self._load(0, 0)

    @property
    def num_micro_batches(self) -> int:
        """N, the number of micro-batches in a step."""
        return self._global_batch_size // self._m

    def position(self, step: int) -> int:
        """Number of samples used before `step`: the data position in a checkpoint of that step."""
        return step * self._global_batch_size

    def micro_batch(self, step: int, i: int) -> Sample:
        """The collated samples of micro-batch i of `step`: dict of tensors (m, ...).

        Raises `UserCodeError` naming the sample's index when the dataset raises or a sample's keys, shapes or
        types differ from sample 0's. Restores all global random generators.
        """
        if not 0 <= i < self.num_micro_batches:
            raise ValueError(f"micro-batch {i} is not in 0..{self.num_micro_batches - 1}")
        start = self.position(step) + i * self._m
        with preserved_randomness():
            samples = [self._load(*at) for at in sample_indices(self._seed, start, self._m, self._length)]
        return {name: torch.stack([sample[name] for sample in samples]) for name in self._template}

    def _load(self, epoch: int, index: int) -> Sample:
        seed_everything(seed64("sample", self._seed, epoch, index))
        sample = _as_tensors(index, call_user_code(f"dataset[{index}]", self._dataset.__getitem__, index))
        template: Sample = getattr(self, "_template", sample)
        if list(sample) != list(template):
            raise UserCodeError(
                f"dataset[{index}]: entries {list(sample)} differ from sample 0's {list(template)}"
            )
        for name, value in sample.items():
            expected = template[name]
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise UserCodeError(
                    f"dataset[{index}][{name!r}]: {_form(value)} differs from sample 0's {_form(expected)};"
                    " all samples must have one shape (pad or crop them)"
                )
        return sample


def _refuse_other_kinds(dataset: object) -> None:
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UserCodeError(
            "Training.dataset: it returns a DataLoader; return the dataset that the loader reads. Makara "
            "shuffles, batches and collates samples itself"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserCodeError(
            f"Training.dataset: it returns a {type(dataset).__name__}; expected an object with __len__ and "
            "__getitem__(index), such as a torch.utils.data.Dataset: workers read samples in any order"
        )


def _as_tensors(index: int, sample: object) -> Sample:
    if not isinstance(sample, Mapping) or not sample:
        raise UserCodeError(f"dataset[{index}]: expected a dict of tensors, got {type(sample).__name__}")
    entries = cast(Mapping[str, object], sample)
    return {name: _as_tensor(f"dataset[{index}][{name!r}]", entries[name]) for name in sorted(entries)}


def _as_tensor(place: str, value: object) -> Tensor:
    inner = value[0] if isinstance(value, list | tuple) and value else value
    is_number = isinstance(inner, Tensor) and inner.numel() == 1  # torch takes a list of these as numbers
    known = isinstance(value, Tensor) or is_number
    if isinstance(inner, Mapping | str | bytes | Tensor) and not known:
        kind = type(value).__name__ + (f" of {type(inner).__name__}" if inner is not value else "")
        raise UserCodeError(
            f"{place}: expected a tensor, an array or numbers, got a {kind}. Make each part an entry of its "
            "own, a tensor of one shape for all samples: pad boxes and labels to a fixed number, with a mask"
        )
    return call_user_code(place, torch.as_tensor, value)


def _form(value: Tensor) -> str:
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
