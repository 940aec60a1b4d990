"""Samples loaded ahead of need: the same samples, a bounded number, and no trace in anybody's generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from makara.model.data import Batches
from makara.model.errors import UserCodeError
from makara.worker.execution.prefetch import Prefetcher


class Noisy:
    """Twelve samples that draw from every generator; `broken` raises."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.loaded = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded += 1
        if index == self.broken:
            raise ValueError("a torn file")
        noise = random.random() + np.random.random() + float(torch.rand(()))
        return {"x": torch.tensor([index, noise], dtype=torch.float64)}


def state() -> tuple[object, ...]:
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    return python, str(numpy), cpu.tolist()


def test_what_is_loaded_ahead_is_what_would_have_been_loaded() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    plain, batches = Batches(Noisy(), 5, 8, 2), Batches(Noisy(), 5, 8, 2)
    order = [0, 2, 3]  # micro-batch 1 goes another way
    feed = Prefetcher(batches)
    for step in (0, 0, 1, 2):  # the second is another attempt
        feed.begin(step, order, order)
        for micro_batch in order:
            before = state()
            for _ in range(draw.randrange(4)):
                feed.load_ahead()
            assert state() == before
            expected = plain.micro_batch(step, micro_batch)["x"]
            assert torch.equal(feed.take(micro_batch)["x"], expected)


def test_no_more_than_four_micro_batches_are_kept_where_they_are_large() -> None:
    data = Noisy()
    feed, order = Prefetcher(Batches(data, 5, 4, 1), ahead_bytes=0), [0, 1, 2, 3]
    data.loaded = 0
    feed.begin(0, order, order)
    feed.take(0)
    while feed.load_ahead():
        pass
    assert data.loaded == 1 + 4  # three of this step and one of the next
    for micro_batch in (1, 2, 3):
        feed.take(micro_batch)
    feed.begin(1, order, order)
    feed.take(0)
    assert data.loaded == 1 + 4


@pytest.mark.parametrize(("ahead_bytes", "kept"), [(6 * 16 + 15, 6), (1 << 20, 7)])
def test_small_ones_are_kept_up_to_the_bytes_given_or_the_end_of_the_next_step(
    ahead_bytes: int, kept: int
) -> None:
    data = Noisy()
    feed, order = Prefetcher(Batches(data, 5, 4, 1), ahead_bytes), [0, 1, 2, 3]  # two numbers of 8 bytes each
    data.loaded = 0
    feed.begin(0, order, order)
    feed.take(0)
    while feed.load_ahead():
        pass
    assert data.loaded == 1 + kept


def test_a_worker_without_samples_loads_none() -> None:
    feed = Prefetcher(Batches(Noisy(), 5, 4, 1))
    feed.begin(0, [], [])
    assert not feed.load_ahead()


def test_a_sample_that_cannot_be_loaded_fails_only_whoever_needs_it() -> None:
    plain = Batches(Noisy(), 5, 1, 1)
    broken = int(plain.micro_batch(1, 0)["x"][0, 0])
    feed = Prefetcher(Batches(Noisy(broken), 5, 1, 1))
    feed.begin(0, [0], [0])
    feed.take(0)
    assert not feed.load_ahead()  # step 1's, and what comes after it waits
    feed.begin(1, [0], [0])
    assert not feed.load_ahead()
    with pytest.raises(UserCodeError, match="a torn file"):
        feed.take(0)
