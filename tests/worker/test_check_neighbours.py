"""Where no whole step is compared, neighbouring sections are compared with the two joined."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from coupled_models import Net, sound
from makara.worker import Training
from makara.worker.check.check import CheckSettings, check
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1]
TOO_LITTLE = 60_000  # bytes: for a step of the whole model; two sections fit


class ByLayout(torch.autograd.Function):
    """Its backward is right for contiguous gradients alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.is_contiguous() else 2 * gradient


class Mixing(nn.Module):
    """Mixes positions, by a product of which the gradient is not contiguous."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.mix, self.faulty = nn.Parameter(torch.eye(8)), faulty

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x.transpose(1, 2), self.mix).transpose(1, 2)
        return ByLayout.apply(x) if self.faulty else x


def report_of(training: Training, **settings: Any) -> dict[str, Any]:
    return check(training, CheckSettings(num_sections=5, **settings), FOLDER)


def test_a_cut_that_changes_a_gradient_is_found_where_no_step_is_compared() -> None:
    report = report_of(sound(model=lambda: Net(lambda: Mixing(faulty=True))), memory_bytes=TOO_LITTLE)
    assert report["not_compared"] is not None
    assert report["findings"] != []
    for found in report["findings"]:
        assert "where the model is cut between sections" in found["differs"]
        assert "memory layout" in found["differs"]
        assert "gradient of 'embed.weight'" in found["differs"] or "layers." in found["differs"]


def test_pairs_whose_cut_changes_nothing_pass_and_are_counted() -> None:
    report = report_of(sound(model=lambda: Net(lambda: Mixing(faulty=False))), memory_bytes=TOO_LITTLE)
    assert report["not_compared"] is not None
    assert report["findings"] == []
    (note,) = (note for note in report["notes"] if "neighbouring" in note)
    assert re.fullmatch(r"(\d) of \1 kinds of neighbouring sections were compared with the two joined", note)


def test_pairs_that_are_left_out_are_counted_with_the_reason() -> None:
    report = report_of(sound(), max_seconds=1e-9)
    (note,) = (note for note in report["notes"] if "neighbouring" in note)
    assert note.startswith("0 of ")
    assert note.endswith("left out: it would take longer than 1e-09 s")


def test_no_pair_is_compared_where_the_user_skips_the_comparison() -> None:
    report = report_of(sound(), compare=False)
    assert not any("neighbouring" in note for note in report["notes"])
