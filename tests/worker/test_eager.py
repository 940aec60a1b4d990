"""The user's own module as the yardstick: one step, whole runs, schedules by parameter group."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from eager_runs import PreciseModel, run_eager
from makara.model.data import Batches
from makara.model.errors import UserCodeError
from makara.model.partition.partition import choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.check.eager import EagerModel
from makara.worker.sections.grad_sums import mean_loss
from models import masked_loss, skip_model, tied_gpt, untied_mlp
from reference import run_reference
from torch import Tensor, nn
from whole_runtime import whole_runtime

M, N, SEED = 2, 3, 11


def batches(training: Training) -> Batches:
    return Batches(training.dataset(), SEED, M * N, M)


def in_pieces(training: Training) -> tuple[float, dict[str, Tensor]]:
    """(loss, mean gradients) of the first step, section by section, summed in floating point."""
    traced = trace(training, M, SEED)
    chain = split(traced, choose_cuts(traced))
    runtime = whole_runtime(chain, training, SEED)
    total: dict[str, Tensor] = {}

    def add(_section: int, name: str, gradient: Tensor) -> None:
        total[name] = total[name] + gradient if name in total else gradient

    pieces: list[tuple[float, float]] = []
    data = batches(training)
    for i in range(N):
        piece = runtime.forward(0, i, 0, chain.num_sections, {}, data.micro_batch(0, i), keep=True).piece
        runtime.backward(i, 0, {}, add)
        assert piece is not None
        pieces.append((piece.loss_sum, piece.weight))
    loss, weight = mean_loss(pieces)
    return loss, {name: gradient / weight for name, gradient in total.items()}


@pytest.mark.parametrize("training", [tied_gpt(dropout=0.0), untied_mlp()], ids=["tied", "untied"])
def test_a_step_of_the_users_module_agrees_with_the_step_in_pieces(training: Training) -> None:
    traced = trace(training, M, SEED)
    found = EagerModel(training, traced, batches(training), seed=SEED).step(0)
    loss, gradients = in_pieces(training)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_weights_of_unequal_micro_batches_divide_once() -> None:
    training = dataclasses.replace(skip_model(), loss=masked_loss)
    traced = trace(training, M, SEED)
    scaled = PreciseModel(training, traced, batches(training), seed=SEED, loss_scale=1024.0).step(0)
    plain = EagerModel(training, traced, batches(training), seed=SEED).step(0)
    assert scaled.loss == plain.loss
    assert all(torch.equal(scaled.gradients[name], plain.gradients[name]) for name in plain.gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_of_the_users_module_is_repeatable_and_learns(precision: Precision) -> None:
    training = tied_gpt(dropout=0.1)
    traced = trace(training, M, SEED)

    def run() -> tuple[list[float], dict[str, Tensor]]:
        return run_eager(
            PreciseModel(training, traced, batches(training), seed=SEED, precision=precision), steps=3
        )

    (losses, state), (again, state_again) = run(), run()
    assert losses == again
    assert all(torch.equal(state[name], state_again[name]) for name in state)
    assert not torch.equal(state["embed.weight"], traced.initial("embed.weight"))


def by_group(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": [p for _, p in named if p.dim() > 1], "lr": torch.tensor(0.2)},
            {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.1},
        ],
        momentum=0.9,
    )


def test_a_schedule_by_group_agrees_with_one_whole_optimizer() -> None:
    training = dataclasses.replace(
        untied_mlp(),
        optimizer=by_group,
        schedule=lambda step: [1 / (step + 1), 0.5],
    )
    traced = trace(training, M, SEED)
    chain = split(traced, choose_cuts(traced))
    losses, weights = run_eager(EagerModel(training, traced, batches(training), seed=SEED), steps=3)
    found, state = run_reference(
        training,
        microbatch_size=M,
        num_micro_batches=N,
        cuts=chain.cuts,
        steps=3,
        seed=SEED,
        numerics="fast",
    )
    assert found == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(state[f"weights/{name}"], weight, rtol=1e-4, atol=1e-5)


def test_a_schedule_with_a_factor_too_many_is_refused() -> None:
    training = dataclasses.replace(untied_mlp(), optimizer=by_group, schedule=lambda step: [1.0, 1.0, 1.0])
    model = EagerModel(training, trace(training, M, SEED), batches(training), seed=SEED)
    with pytest.raises(UserCodeError, match=r"schedule\(0\): 3 factors for 2 parameter groups"):
        model.apply(0, {}, {})
