"""The sample stream: every sample once an epoch, the same for ever, whatever the shape of the job."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.model.data import Batches, SampleOrder, sample_indices
from makara.model.errors import UserCodeError
from makara.model.seeds import seed64
from models import Tokens
from torch import Tensor


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 9), st.integers(1, 400))
def test_an_epoch_holds_every_sample_once(seed: int, epoch: int, length: int) -> None:
    assert sorted(SampleOrder(seed, epoch, length)) == list(range(length))


def test_the_order_differs_between_seeds_and_epochs_and_is_not_sorted() -> None:
    orders = [tuple(SampleOrder(seed, epoch, 100)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert tuple(range(100)) not in orders


def test_the_order_never_changes_between_versions() -> None:
    assert list(SampleOrder(7, 0, 10)) == ORDER_7_0_10
    assert seed64("section", 1, 2, "x") == SEED_SECTION_1_2_X


ORDER_7_0_10 = [8, 0, 5, 2, 9, 3, 7, 1, 6, 4]
SEED_SECTION_1_2_X = 953110489756300188


def test_a_huge_epoch_takes_no_memory() -> None:
    length = 10**12
    assert 0 <= SampleOrder(3, 0, length)[length - 1] < length


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 50), st.integers(1, 40), st.integers(1, 40))
def test_reading_in_pieces_equals_reading_at_once(length: int, start: int, first: int, second: int) -> None:
    together = sample_indices(5, start, first + second, length)
    assert together == sample_indices(5, start, first, length) + sample_indices(
        5, start + first, second, length
    )


def test_the_stream_straddles_epochs_without_loss() -> None:
    stream = sample_indices(1, 0, 30, 10)
    for epoch in range(3):
        assert sorted(index for e, index in stream if e == epoch) == list(range(10))


def test_a_step_holds_the_same_samples_for_every_micro_batch_size() -> None:
    def rows(m: int) -> Tensor:
        batches = Batches(Tokens(23), 9, 12, m)
        return torch.cat([batches.micro_batch(2, i)["tokens"] for i in range(batches.num_micro_batches)])

    assert torch.equal(rows(1), rows(4))
    assert torch.equal(rows(4), rows(12))


class Augmented:
    """Draws from Python's and torch's global generators, as augmentations do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2) + random.random()}


def test_augmentations_depend_on_the_sample_alone_and_disturb_no_one() -> None:
    batches = Batches(Augmented(), 4, 8, 2)
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    first = batches.micro_batch(0, 1)["x"]
    assert torch.equal(torch.randn(3), expected)
    batches.micro_batch(3, 0)
    assert torch.equal(batches.micro_batch(0, 1)["x"], first)
    assert not torch.equal(batches.micro_batch(1, 1)["x"], first)


class Faulty(Tokens):
    def __init__(self, fault: str) -> None:
        super().__init__(6)
        self.fault = fault

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index != 4:
            return sample
        if self.fault == "raises":
            raise RuntimeError("torn record")
        if self.fault == "shape":
            return {**sample, "tokens": sample["tokens"][:-1]}
        if self.fault == "type":
            return {**sample, "tokens": sample["tokens"].float()}
        return {"tokens": sample["tokens"]}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", r"dataset\[4\]: RuntimeError: torn record"),
        ("shape", r"dataset\[4\]\['tokens'\]: int64\[11\] differs from sample 0's int64\[12\]"),
        ("type", r"dataset\[4\]\['tokens'\]: float32\[12\]"),
        ("missing", r"dataset\[4\]: entries \['tokens'\]"),
    ],
)
def test_a_faulty_sample_is_named_by_its_index(fault: str, message: str) -> None:
    batches = Batches(Faulty(fault), 0, 6, 6)
    with pytest.raises(UserCodeError, match=message):
        batches.micro_batch(0, 0)


class Listed(Tokens):
    """Its samples are lists of numbers that are tensors."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(4)
        self.shape = shape

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": [torch.full(self.shape, index), torch.full(self.shape, 7)]}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_list_of_numbers_that_are_tensors_is_a_tensor(shape: tuple[int, ...]) -> None:
    batches = Batches(Listed(shape), 0, 4, 4)
    assert sorted(batches.micro_batch(0, 0)["x"].tolist()) == [[index, 7] for index in range(4)]


def test_a_list_of_tensors_of_several_numbers_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserCodeError, match=r"got a list of Tensor\. Make each part an entry"):
        Batches(Listed((2,)), 0, 4, 4)


def test_a_micro_batch_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="microbatch_size: 4 does not divide global_batch_size 6"):
        Batches(Tokens(), 0, 6, 4)


def test_empty_data_is_refused() -> None:
    with pytest.raises(UserCodeError, match="at least one sample"):
        Batches(Tokens(0), 0, 2, 1)
