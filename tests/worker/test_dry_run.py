"""What the dry run stands on: equal random numbers, differences, what user code is seen to call and keep."""

from __future__ import annotations

import random
from pathlib import Path

import coupled_models
import pytest
import torch
from makara.worker.check.calls import Calls
from makara.worker.check.findings import Report, difference
from makara.worker.check.global_state import Watch
from makara.worker.check.memory import refusal
from makara.worker.check.random_numbers import FixedNumbers
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1]


def test_random_numbers_depend_on_operation_and_shape_alone() -> None:
    x = torch.ones(6, 4)
    with FixedNumbers() as numbers:
        first = torch.nn.functional.dropout(x, 0.5)
        torch.rand(3)
        again = torch.nn.functional.dropout(x.t().contiguous().t(), 0.5)  # other memory, same shape
    assert torch.equal(first, again)
    assert 0 < int((first == 0).sum()) < x.numel()
    assert numbers.counts == {"bernoulli": 2, "rand": 1}


def test_what_drops_nothing_draws_nothing() -> None:
    """Found: attention was listed as random though its dropout was 0."""
    query = torch.ones(1, 2, 4, 8)
    with FixedNumbers() as numbers:
        nn.functional.scaled_dot_product_attention(query, query, query)
        torch.native_dropout(query, 0.5, train=False)
    assert numbers.counts == {}
    with FixedNumbers() as numbers:
        nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert numbers.counts.total() == 1


def test_an_operation_that_writes_its_second_argument_leaves_the_first_alone() -> None:
    """Found: a leaky ReLU with random slopes wrote its output into its input, and its slopes nowhere."""
    given = torch.linspace(-3, 2.5, 6)
    x = given.clone().requires_grad_()
    with FixedNumbers() as numbers:
        y = nn.functional.rrelu(x, training=True)
        in_place = nn.functional.rrelu(x * 1, training=True, inplace=True)
    y.sum().backward()
    assert numbers.counts.total() == 2
    assert torch.equal(x, given)
    assert torch.equal(in_place, y)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (y / x).detach())


def test_expected_numbers_leave_dropout_out() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with FixedNumbers(expected=True):
        assert torch.equal(torch.nn.functional.dropout(x, 0.3), x)
        assert torch.equal(torch.empty(4).normal_(2.0, 3.0), torch.full((4,), 2.0))
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5))
        assert torch.equal(torch.empty(2).uniform_(1.0, 4.0), torch.full((2,), 2.5))
        assert torch.equal(torch.empty(2).exponential_(4.0), torch.full((2,), 0.25))
        assert torch.randint(2, 8, (3,)).tolist() == [5, 5, 5]
        assert torch.randint_like(torch.ones(2), 9).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("one", "other", "floor", "expected"),
    [
        (torch.zeros(3), torch.zeros(3), 0.0, 0.0),
        (torch.tensor([0.0, 2.0]), torch.tensor([0.0, 2.5]), 0.0, 0.2),
        (torch.tensor([1e-9]), torch.tensor([-1e-9]), 1.0, 2e-9),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0, 0.0),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), 0.0, float("inf")),
        (torch.zeros(2), torch.zeros(3), 0.0, float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0, 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0, float("inf")),
    ],
)
def test_a_difference_is_relative_to_the_largest_magnitude(
    one: Tensor, other: Tensor, floor: float, expected: float
) -> None:
    assert difference(one, other, floor) == pytest.approx(expected)


def test_a_call_is_found_however_it_was_imported() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    clip = torch.nn.utils.clip_grad_norm_  # bound before anybody looks
    calls = Calls()
    with calls.watched():
        clip([weight], 0.25)
    report = Report()
    calls.blame("Training.optimizer", report)
    (finding,) = report.findings
    assert "torch.nn.utils.clip_grad_norm_ at" in finding.differs
    assert "test_dry_run.py" in finding.differs
    assert "Training(clip_grad_norm=0.25)" in finding.remedy


def test_state_that_changes_while_watched_is_named() -> None:
    kept = {"calls": 0}

    def loss() -> None:
        kept["calls"] += 1

    module = nn.Sequential(coupled_models.Calls(), nn.BatchNorm1d(2))
    watch = Watch(FOLDER, {"Training.loss": loss})
    with watch.over(module):
        loss()
        module[0].calls = 7
        module[1].running_mean += 1  # a buffer, which is compared by value
        random.random()
        coupled_models.SHARED["x"] = torch.zeros(())
    coupled_models.SHARED.clear()
    assert list(watch.changed) == [
        "the model's attribute '0.calls'",
        "the global coupled_models.SHARED",
        "the variable 'kept' of Training.loss",
        "the state of Python's random",
    ]


def test_a_run_beyond_the_machine_is_refused_with_the_figures() -> None:
    assert refusal(7 << 20, 10 << 20) is None
    assert refusal(7 << 20, None) is None
    said = refusal(1 << 60, None)
    assert said is not None
    assert "1024 PiB of memory" in said
    assert refusal(7 << 20, (10 << 20) - 2) is not None
