"""Parameters that only outputs depend on which the loss ignores are not trained, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_runs import run_eager
from makara.model.data import Batches
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.check.check import CheckSettings, check
from makara.worker.check.eager import EagerModel
from models import VOCABULARY, Tokens
from reference import run_reference
from repository import ROOT
from torch import Tensor, nn

M, N, SEED = 2, 3, 11
POOLER = {"pooler.weight", "pooler.bias"}


class Pooled(nn.Module):
    """As BERT's: most losses ignore the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.Linear(8, 8)
        self.pooler = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.layer(self.embed(tokens)))
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        return {"logits": self.head(hidden), "pooled": pooled, "tokens": tokens}


def training_of(loss: Callable[..., Any]) -> Training:
    return Training(
        model=Pooled,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        dataset=Tokens,
    )


def of_all(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["targets"].flatten())


def of_some(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    wanted = batch["targets"] % 4 != 0
    return F.cross_entropy(output["logits"][wanted], batch["targets"][wanted], reduction="sum"), wanted.sum()


def in_place(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    output["logits"].mul_(0.5)
    return of_all(output, batch)


def detached(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return of_all(output, batch) + output["pooled"].detach().mean()


def of_both(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return of_all(output, batch) + output["pooled"].square().mean()


def now_and_then(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return of_all(output, batch) if batch["targets"].sum() < 10**9 else of_both(output, batch)


def by_count(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    some = output["logits"][batch["targets"] == 10**9]
    return of_all(output, batch) if some.numel() == 0 else of_both(output, batch)


@pytest.mark.parametrize("loss", [of_all, of_some, in_place, detached])
def test_what_only_ignored_outputs_depend_on_is_not_trained(loss: Callable[..., Any]) -> None:
    traced = trace(training_of(loss), M)
    assert set(traced.parameter_names) - traced.trainable == POOLER


@pytest.mark.parametrize("loss", [of_both, now_and_then, by_count])
def test_what_the_loss_may_depend_on_is_trained(loss: Callable[..., Any]) -> None:
    assert trace(training_of(loss), M).trainable >= POOLER


def test_an_optimizer_leaves_them_alone_as_in_eager() -> None:
    training = training_of(of_all)
    traced = trace(training, M, SEED)
    chain = split(traced, choose_cuts(traced))
    batches = Batches(training.dataset(), SEED, M * N, M)
    losses, weights = run_eager(EagerModel(training, traced, batches, seed=SEED), steps=3)
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
    for name in POOLER:
        assert torch.equal(state[f"weights/{name}"], weights[name])


def test_a_check_says_what_gets_zeros_for_a_gradient_instead_of_none() -> None:
    report = check(training_of(now_and_then), CheckSettings(), ROOT / "tests")
    assert report["findings"] == []
    (note,) = report["notes"]
    assert note.startswith("no gradient reaches 'pooler.weight', 'pooler.bias' in your module as it is")
