"""Exactness: any partition, placement, order and recomputation gives the bits of the one-process
reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_process import SEED, M, N, Workers, reference_of, same_bits
from makara.model.data import Batches
from makara.model.errors import NonFiniteGradient, RecipeMismatch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from models import intermittent, last_token_loss, skip_model, tied_gpt, untied_mlp
from torch import Tensor, nn
from whole_runtime import gradients_of, whole_runtime

STEPS = 4
reference = partial(reference_of, steps=STEPS)


def chain_of(training: Training, num_sections: int | None = None) -> Sections:
    traced = trace(training, M, SEED)
    return split(traced, choose_cuts(traced, num_sections))


def random_ranges(num_sections: int, shuffle: random.Random) -> list[tuple[int, int]]:
    depth = shuffle.randint(1, num_sections)
    ends = sorted(shuffle.sample(range(1, num_sections), depth - 1))
    return list(zip([0, *ends], [*ends, num_sections], strict=True))


@pytest.mark.parametrize("make", [tied_gpt, untied_mlp, skip_model])
@pytest.mark.parametrize("trial", range(2))
def test_any_partition_order_and_recompute_gives_the_reference_bits(
    make: Callable[[], Training], trial: int
) -> None:
    seed = 1000 + trial
    print(f"seed {seed}")
    shuffle = random.Random(seed)
    training = make()
    chain = chain_of(training)
    losses, expected = reference(training, chain)
    workers = Workers(chain, training, 11, M * N)
    found: list[float] = []
    for step in range(STEPS):  # a morph before every step
        workers.form([random_ranges(chain.num_sections, shuffle) for _ in range(shuffle.randint(1, 3))])
        found.append(workers.step(step, shuffle))
    state = workers.state()
    assert found == losses
    assert state.keys() == expected.keys()
    assert [name for name in state if not same_bits(state[name], expected[name])] == []


def test_a_loss_may_write_into_its_batch() -> None:
    """It runs twice where its section is recomputed."""

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        batch["targets"].add_(1).remainder_(output.shape[-1])
        return last_token_loss(output, batch)

    training = dataclasses.replace(untied_mlp(), loss=loss)
    chain = chain_of(training)
    runtime = whole_runtime(chain, training, SEED)
    batch = Batches(training.dataset(), SEED, M, M).micro_batch(0, 0)
    pieces: list[Any] = []
    gradients: list[dict[str, Tensor]] = []
    for keep in (True, False):
        pieces.append(runtime.forward(0, 0, 0, chain.num_sections, {}, batch, keep=keep).piece)
        if not keep:
            runtime.recompute(0, 0)
        gradients.append(gradients_of(runtime))
    assert pieces[0] == pieces[1]
    assert all(same_bits(gradients[0][name], gradients[1][name]) for name in chain.trainable_names)


def test_a_gradient_that_is_zero_in_every_other_step_doubles_none_but_the_first() -> None:
    shuffle = random.Random(3)
    training = intermittent()
    chain = chain_of(training)
    losses, expected = reference(training, chain, steps=6)
    workers = Workers(chain, training, 11, M * N)
    found: list[float] = []
    for step in range(6):
        workers.form([random_ranges(chain.num_sections, shuffle) for _ in range(1 + step % 3)])
        found.append(workers.step(step, shuffle))
    state = workers.state()
    assert workers.attempts == [2, 1, 1, 1, 1, 1]
    assert found == losses
    assert [name for name in expected if not same_bits(state[name], expected[name])] == []


def test_a_gradient_that_comes_back_much_larger_than_it_went_takes_one_more_attempt() -> None:
    shuffle = random.Random(4)
    training = dataclasses.replace(intermittent(), clip_grad_norm=None)
    chain = chain_of(training)
    workers = Workers(chain, training, 11, M * N)
    workers.form([random_ranges(chain.num_sections, shuffle)])
    workers.step(0, shuffle)
    workers.step(1, shuffle)  # in which it is zero
    for section in (section for worker in workers.replicas[0] for section in worker.sections.values()):
        section.scales = {
            name: scale * 2.0**30 if name == "sometimes.weight" else scale
            for name, scale in section.scales.items()
        }
    workers.step(2, shuffle)
    workers.step(3, shuffle)
    assert workers.attempts == [2, 1, 2, 1]


def test_a_checkpoint_from_before_scales_were_kept_can_be_gone_on_from() -> None:
    """Such a one holds a scale of 0 where the last gradient was zero, or none."""
    shuffle = random.Random(5)
    training = intermittent()
    workers = Workers(chain_of(training), training, 11, M * N)
    workers.form([random_ranges(workers.chain.num_sections, shuffle)])
    workers.step(0, shuffle)
    workers.step(1, shuffle)  # in which it is zero
    for section in (section for worker in workers.replicas[0] for section in worker.sections.values()):
        if "sometimes.weight" in section.scales:
            section.scales["sometimes.weight"] = 0.0
        section.scales.pop("sometimes.bias", None)
    workers.form([random_ranges(workers.chain.num_sections, shuffle)])
    for step in range(2, 6):
        workers.step(step, shuffle)
    assert workers.attempts == [2, 1, 2, 1, 1, 1]


def test_loss_falls() -> None:
    training = tied_gpt()
    losses, _ = reference(training, chain_of(training, 1), "fast", steps=40)
    assert losses[-1] < 0.8 * losses[0]


def test_exact_and_fast_agree_in_floating_point() -> None:
    training = tied_gpt()
    chain = chain_of(training)
    exact, fast = reference(training, chain)[0], reference(training, chain, "fast")[0]
    assert exact == pytest.approx(fast, rel=1e-5)


@pytest.mark.parametrize("num_sections", [1, 3, None])
@pytest.mark.parametrize("make", [lambda: tied_gpt(dropout=0.0), untied_mlp])
def test_agrees_with_the_users_eager_module(make: Callable[[], Training], num_sections: int | None) -> None:
    training = make()
    chain = chain_of(training, num_sections)
    losses, state = reference(training, chain)
    model = training.model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(chain.traced.initial(name))
    eager = train_eagerly(training, model)
    assert losses == pytest.approx(eager, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[f"weights/{name}"], parameter.detach(), rtol=1e-4, atol=1e-5)


def train_eagerly(training: Training, model: nn.Module) -> list[float]:
    """The same training as a user would write it for one GPU, on the whole batch at once."""
    model.train()
    optimizer = training.optimizer(list(model.named_parameters()))
    schedule = training.schedule or (lambda step: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    batches = Batches(training.dataset(), 11, M * N, M * N)
    losses: list[float] = []
    for step in range(STEPS):
        batch = batches.micro_batch(step, 0)
        loss = training.loss(model(batch["tokens"]), batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        assert training.clip_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_graph_with_another_hash_is_refused() -> None:
    training = tied_gpt()
    other = chain_of(tied_gpt(dropout=0.2))
    with pytest.raises(RecipeMismatch, match="graph_hash"):
        reference(training, other)


def test_a_gradient_that_is_not_a_number_ends_the_run_and_names_the_parameter() -> None:
    training = untied_mlp()
    poisoned = Training(
        model=training.model,
        loss=lambda output, batch: (output * float("nan")).mean(),
        optimizer=training.optimizer,
        dataset=training.dataset,
    )
    with pytest.raises(NonFiniteGradient, match=r"layers\.0\.weight"):
        reference(poisoned, chain_of(poisoned))
