"""Modules that a user puts in evaluation mode stay there, as in a plain loop over the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from makara.manager.cli import main as cli
from makara.model.data import Batches
from makara.model.tracing.trace import trace
from makara.model.training import Training, set_training_mode
from makara.worker.check.check import CheckSettings, check
from plain_models import WIDTH, Layers, training
from reference import run_reference
from torch import Tensor, nn

M, N, STEPS, SEED = 4, 2, 3, 5
FOLDER = Path(__file__).parent


class Pretrained(nn.Module):
    """A trunk with statistics and dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        nn.init.constant_(self.norm.running_mean, 0.3)  # pyright: ignore[reportArgumentType]
        nn.init.constant_(self.norm.running_var, 2.0)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)).relu())


def in_evaluation_mode() -> nn.Module:
    model = Layers(Pretrained)
    model.between.eval()
    return model


def norms_alone() -> nn.Module:
    model = Layers(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()
            part.requires_grad_(False)
    return model


class HeldInTrain(Layers):
    """The other usual way: `train()` itself leaves the trunk out."""

    def __init__(self) -> None:
        super().__init__(Pretrained)

    def train(self, mode: bool = True) -> HeldInTrain:
        super().train(mode)
        self.between.eval()
        return self


def in_a_plain_loop(given: Training, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient accumulation as a user writes it; nothing here sets a mode."""
    optimizer = given.optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    batches = Batches(given.dataset(), SEED, M * N, M)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i in range(N):
            batch = batches.micro_batch(step, i)
            loss: Any = given.loss(model(batch["x"]), batch)
            (loss / N).backward()
            total += float(loss.detach()) / N
        optimizer.step()
        losses.append(total)
    state = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    return losses, state | {f"buffers/{name}": buffer for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (in_evaluation_mode, ["between"]),
        (norms_alone, ["between.0", "between.1"]),
        (lambda: HeldInTrain().train(), ["between"]),
    ],
)
def test_what_is_in_evaluation_mode_stays_there_as_in_a_plain_loop(
    build: Callable[[], nn.Module], named: list[str]
) -> None:
    given = training(build)
    traced = trace(given, M, SEED)
    assert list(traced.evaluating) == named
    model = build()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(traced.initial(name))
    expected, state = in_a_plain_loop(given, model)
    losses, found = run_reference(
        given, microbatch_size=M, num_micro_batches=N, cuts=[], steps=STEPS, seed=SEED, numerics="fast"
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_frozen_batch_norm_takes_micro_batches_of_one_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(training(norms_alone), CheckSettings(), FOLDER)
    assert report["microbatch_size"] == 1
    assert report["buffers"] == {}
    assert report["findings"] == []
    folders = [str(FOLDER), str(FOLDER.parent / "support")]
    source = f"import sys\nsys.path += {folders!r}\nimport test_modes as t\n"
    (tmp_path / "train.py").write_text(f"{source}def build():\n    return t.training(t.norms_alone)\n")
    assert cli.main(["check", "train:build", "--workdir", str(tmp_path)]) == 0
    assert (
        "in evaluation mode, as Training.model returns them: between.0, between.1" in capsys.readouterr().out
    )


def test_a_model_that_is_returned_in_evaluation_mode_is_trained_whole() -> None:
    """As `from_pretrained` of transformers returns every model."""
    model = Layers(Pretrained).eval()
    assert set_training_mode(model) == ()
    assert all(part.training for part in model.modules())
