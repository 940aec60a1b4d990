"""Running statistics through a step: the same bits on every shape, applied with the commit, kept as state."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from eager_runs import run_eager
from in_process import SEED, M, N, Workers, reference_of, same_bits
from makara.model.data import Batches
from makara.model.errors import RecipeMismatch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.pipeline import Range, grid
from makara.worker.check.eager import EagerModel
from makara.worker.execution.buckets import buckets
from makara.worker.sections.buffer_updates import RunningSum, combine
from makara.worker.sections.runtime import SectionRuntime
from models import normed_mlp
from torch import Tensor

STEPS = 6
reference = partial(reference_of, steps=STEPS)


@cache
def chain_of(precision: Precision = "fp32") -> tuple[Training, Sections]:
    training = normed_mlp()
    traced = trace(training, M, SEED, precision)
    return training, split(traced, choose_cuts(traced))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_shape_gives_the_reference_statistics(precision: Precision) -> None:
    seed = 21
    print(f"seed {seed}")
    shuffle = random.Random(seed)
    training, chain = chain_of(precision)
    losses, expected = reference(training, chain)
    workers = Workers(chain, training, SEED, M * N)
    found: list[float] = []
    for step in range(STEPS):
        cut = shuffle.randint(1, chain.num_sections - 1)
        workers.form([[(0, cut), (cut, chain.num_sections)], [(0, chain.num_sections)]][: step % 2 + 1])
        found.append(workers.step(step, shuffle))
    state = workers.state()
    assert found == losses
    assert [name for name in expected if not same_bits(state[name], expected[name])] == []
    applied = STEPS - workers.skipped
    assert int(state["buffers/norms.0.num_batches_tracked"]) == applied
    assert int(state["statistics/norms.2.num_batches_tracked"]) == applied
    assert int(state["buffers/norms.3.num_batches_tracked"]) == 2 * applied, "used twice in a forward"
    assert bool(workers.skipped) == (precision == "fp16")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_agree_with_the_users_module(numerics: str) -> None:
    base, _ = chain_of()
    training = dataclasses.replace(base, optimizer=lambda named: torch.optim.SGD(named, lr=1e-2))
    torch.manual_seed(0)
    traced = trace(quiet(training), M, SEED)
    chain = split(traced, choose_cuts(traced))
    batches = Batches(training.dataset(), SEED, M * N, M)
    losses, state = reference(quiet(training), chain, numerics, steps=3)
    eager, after = run_eager(EagerModel(quiet(training), traced, batches, seed=SEED), steps=3)
    assert losses == pytest.approx(eager, rel=1e-5)
    for name, tensor in after.items():
        kept = [state[k] for kind in ("weights", "buffers", "statistics") if (k := f"{kind}/{name}") in state]
        torch.testing.assert_close(kept, [tensor], rtol=1e-4, atol=1e-6)


def quiet(training: Training) -> Training:
    """Without dropout: the model's own is in training mode, which only the user can leave."""

    def build() -> Any:
        model = training.model()
        original = model.forward

        def forward(tokens: Tensor) -> Tensor:
            model.training = False  # read by F.dropout alone; the batch norms have flags of their own
            return original(tokens)

        model.forward = forward
        return model

    return dataclasses.replace(training, model=build)


def test_a_step_that_overflows_leaves_them() -> None:
    training, chain = chain_of("fp16")
    _, state = reference(training, chain, steps=1)
    assert bool((state["buffers/norms.0.running_mean"] == 0).all())
    assert int(state["buffers/norms.0.num_batches_tracked"]) == 0


def test_they_are_part_of_the_state_and_no_stranger_is_let_in() -> None:
    training, chain = chain_of()
    index = next(s.index for s in chain.sections if "norms.2.running_mean" in s.updates)
    section = SectionRuntime(chain, index, training, SEED)
    section.apply(
        0,
        {name: torch.zeros_like(p) for name, p in section.trainable.items()},
        statistics={"norms.2.running_mean": torch.full((24,), 3.0), "of.another": torch.ones(2)},
    )
    tensors, scalars = section.state()
    assert bool((tensors["statistics/norms.2.running_mean"] == 3.0).all())
    other = SectionRuntime(chain, index, training, SEED, initialise=False)
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, scalars)
    assert bool((other.buffers["norms.2.running_mean"] == 3.0).all())
    del tensors["statistics/norms.2.running_mean"]
    with pytest.raises(RecipeMismatch, match=r"statistics/norms\.2\.running_mean"):
        other.load_state(tensors, scalars)


def test_a_bucket_carries_its_sections_buffers_to_all_of_their_hosts() -> None:
    _, chain = chain_of()
    last = chain.num_sections
    plan = grid([Range(0, 2), Range(2, last)], 2, N, generation=1)
    parts = buckets(chain, plan)
    carried = [name for bucket in parts for name in bucket.buffers]
    assert sorted(carried) == sorted(chain.updated_buffers)
    for bucket in parts:
        for name in bucket.buffers:
            users = {s.index for s in chain.sections if name in s.buffers}
            assert users == set(bucket.sections)
            assert bucket.hosts == tuple(sorted(w for s in users for w in plan.hosts(s)))


def table(values: Sequence[dict[str, Tensor]], own: Sequence[int]) -> RunningSum:
    total = RunningSum(values[0], len(values))
    total.reset()
    for i in own:
        total.add(i, {**values[i], "of.another.bucket": torch.ones(3)})
    return total


class Others:
    """The other hosts' values, which an all-reduce adds to a copy of this one's."""

    def __init__(self, parts: Sequence[RunningSum]) -> None:
        self._parts = parts

    def sum(self, tensor: Tensor) -> None:
        for other in self._parts:
            tensor.add_(other.means if tensor.is_floating_point() else other.counters)

    def max(self, tensor: Tensor) -> None:
        raise AssertionError("buffers are summed")


@pytest.mark.parametrize("seed", range(3))
def test_any_division_over_workers_gives_the_bits_of_the_mean_in_order(seed: int) -> None:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    shuffle = random.Random(seed)
    values = [
        {
            "mean": torch.randn(3, 4, generator=generator) * 10.0 ** shuffle.randint(-8, 8),
            "double": torch.randn(2, generator=generator, dtype=torch.float64),
            "half": torch.randn(5, generator=generator).bfloat16(),
            "zero": torch.tensor([-0.0, 0.0]),
            "count": torch.tensor(2**60 + 7),
            "flag": torch.tensor([True, False]),
        }
        for _ in range(N)
    ]
    whole = table(values, range(N)).finalise()
    for name, value in whole.items():
        assert same_bits(value, combine([v[name] for v in values])), name
        assert value.dtype == values[0][name].dtype
    assert not bool(torch.signbit(whole["zero"]).any())
    for _ in range(3):
        owner = [shuffle.randrange(3) for _ in range(N)]
        parts = [table(values, [i for i in range(N) if owner[i] == worker]) for worker in range(3)]
        summed = parts[0].finalise(Others(parts[1:]))
        assert all(same_bits(summed[name], whole[name]) for name in whole)
        again = parts[0].finalise(Others(parts[1:]))  # a worker's own values stay as they are
        assert all(same_bits(again[name], whole[name]) for name in whole)


def test_a_buffer_that_no_micro_batch_moves_keeps_its_bits() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert same_bits(combine([value] * 7), value)


@pytest.mark.parametrize("num_micro_batches", [3, 10, 49])
def test_a_double_that_no_micro_batch_moves_keeps_its_bits(num_micro_batches: int) -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(1000, generator=generator, dtype=torch.float64)
    value[0] = torch.finfo(torch.float64).max
    assert same_bits(combine([value] * num_micro_batches), value)
