"""Gradient sums: order and grouping change no bit; overflow is seen; clipping equals torch's."""

from __future__ import annotations

import math
import random

import pytest
import torch
from makara.model.errors import NonFiniteGradient, UserCodeError
from makara.worker.sections import grad_sums
from makara.worker.sections.grad_check import is_usable
from makara.worker.sections.grad_sums import (
    HEADROOM_BITS,
    ExactSum,
    FastSum,
    Totals,
    clip_coefficient,
    global_norm,
    mean_loss,
    parameter_norm,
)
from makara.worker.sections.loss_scale import LossScale
from torch import Tensor, nn

SHAPES = {"a": (70, 1000), "b": (3,), "c": ()}  # a is longer than one chunk


def gradients(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator) * 10 ** (k % 5 - 4) for name, shape in SHAPES.items()}
        for k in range(count)
    ]


def measured(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    total = ExactSum(SHAPES, dict.fromkeys(SHAPES, len(parts)))
    total.reset({})
    for part in parts:
        for name, gradient in part.items():
            total.add(name, gradient)
    totals = total.totals(1.0)
    assert totals.overflowed, "without scales an attempt only measures"
    return dict(totals.scales)


class Others:
    """The hosts' sums but this one's, which an all-reduce adds to a copy of it, chunk by chunk."""

    def __init__(self, sums: list[ExactSum]) -> None:
        self._sums = sums
        self._done = 0

    def sum(self, tensor: Tensor) -> None:
        for other in self._sums:
            tensor.add_(other.buffer[self._done : self._done + tensor.numel()])
        self._done += tensor.numel()

    def max(self, tensor: Tensor) -> None:
        for other in self._sums:
            torch.maximum(tensor, other.maxima, out=tensor)


def summed(
    parts: list[dict[str, Tensor]],
    groups: list[list[int]],
    scales: dict[str, float],
    divisor: float = 1.0,
) -> Totals:
    """Each group on a worker of its own, then the all-reduce, which leaves their own sums as they are."""
    workers: list[ExactSum] = []
    for group in groups:
        worker = ExactSum(SHAPES, dict.fromkeys(SHAPES, len(parts)))
        worker.reset(scales)
        for k in group:
            for name, gradient in parts[k].items():
                worker.add(name, gradient)
        workers.append(worker)
    own = [(worker.buffer.clone(), worker.maxima.clone()) for worker in workers]
    totals = workers[0].totals(divisor, Others(workers[1:]) if len(workers) > 1 else None)
    for worker, (buffer, maxima) in zip(workers, own, strict=True):
        assert torch.equal(worker.buffer, buffer)
        assert torch.equal(worker.maxima, maxima)
    return totals


@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_grouping_gives_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    shuffle = random.Random(seed)
    parts = gradients(9, seed)
    scales = measured(parts)
    expected = summed(parts, [list(range(9))], scales, 9.0).gradients
    for _ in range(4):
        order = list(range(9))
        shuffle.shuffle(order)
        cut = shuffle.randint(1, 8)
        monkeypatch.setattr(grad_sums, "_REDUCED_AT_ONCE", shuffle.choice([501, 4096, 1 << 22]))
        monkeypatch.setattr(grad_sums, "_CHUNK", shuffle.choice([250, 999, 1 << 16]))
        total = summed(parts, [order[:cut], order[cut:]], scales, 9.0)
        assert not total.overflowed
        for name, value in total.gradients.items():
            assert torch.equal(value, expected[name])


def test_the_error_is_within_the_documented_bound() -> None:
    parts = gradients(9, 1)
    total = summed(parts, [list(range(9))], measured(parts), 9.0).gradients
    for name in SHAPES:
        true = torch.stack([part[name].double() for part in parts]).sum(0) / 9.0
        largest = max(float(part[name].abs().max()) for part in parts)
        bound = 9 * largest * 2.0 ** (HEADROOM_BITS - 61) + true.abs() * 2.0**-23
        assert bool(((total[name].double() - true).abs() <= bound).all())


def test_growth_within_the_headroom_needs_no_second_attempt_and_beyond_it_does() -> None:
    parts = gradients(5, 2)
    scales = measured(parts)
    within = [{name: g * 2.0**HEADROOM_BITS for name, g in part.items()} for part in parts]
    beyond = [{name: g * 2.0 ** (HEADROOM_BITS + 2) for name, g in part.items()} for part in parts]
    assert not summed(within, [list(range(5))], scales).overflowed
    overflowing = summed(beyond, [list(range(5))], scales)
    assert overflowing.overflowed
    assert not summed(beyond, [list(range(5))], dict(overflowing.scales)).overflowed


def test_the_largest_sum_within_the_limit_does_not_wrap() -> None:
    count = 1000
    limit = 2.0**62 / count
    total = ExactSum({"w": (1,)}, {"w": count})
    total.reset({"w": 1.0})
    largest = torch.tensor([math.nextafter(limit, 0.0)]).double().float()
    largest = torch.minimum(largest, torch.tensor([limit * (1 - 2.0**-20)]))
    for _ in range(count):
        total.add("w", largest)
    totals = total.totals(1.0)
    assert not totals.overflowed
    assert float(totals.gradients["w"]) == pytest.approx(count * float(largest), rel=1e-6)


def test_a_gradient_of_zeros_stays_zero_and_has_no_scale() -> None:
    total = ExactSum({"w": (2,)}, {"w": 3})
    total.reset({})
    total.add("w", torch.zeros(2))
    totals = total.totals(3.0)
    assert not totals.overflowed
    assert totals.scales == {"w": 0.0}
    assert totals.gradients["w"].tolist() == [0.0, 0.0]


def test_a_gradient_of_zeros_leaves_the_scale_as_it_is() -> None:
    total = ExactSum({"w": (2,)}, {"w": 3})
    total.reset({"w": 8.0})
    total.add("w", torch.zeros(2))
    totals = total.totals(3.0)
    assert not totals.overflowed
    assert totals.scales == {"w": 8.0}
    assert totals.gradients["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_overflow_and_named(value: float) -> None:
    total = ExactSum({"u": (2,), "w": (2,)}, {"u": 3, "w": 3})
    total.reset({"u": 1.0, "w": 1.0})
    total.add("w", torch.tensor([1.0, value]))
    totals = total.totals(1.0)
    assert totals.overflowed
    assert totals.non_finite == {"w"}
    assert totals.scales["w"] == 1.0, "the scale stays: nothing better is known"
    assert totals.norms() == {"w": math.inf}


def test_fast_sums_in_floating_point() -> None:
    total = FastSum({"w": (2,)})
    total.reset({})
    total.add("w", torch.tensor([1.0, 2.0]))
    total.add("w", torch.tensor([3.0, 4.0]))
    totals = total.totals(4.0)
    assert not totals.overflowed
    assert totals.gradients["w"].tolist() == [1.0, 1.5]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_torch_bit_for_bit(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(5)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 65), (3,), (), (1000,))]
    found = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    total = global_norm([parameter_norm(gradient) for gradient in found])
    assert torch.equal(total, expected)
    for parameter, gradient in zip(parameters, found, strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient * clip_coefficient(total, max_norm), parameter.grad)


def test_losses_are_divided_by_the_total_weight() -> None:
    assert mean_loss([(6.0, 2.0), (3.0, 1.0)]) == (3.0, 3.0)
    with pytest.raises(UserCodeError, match="add up to 0"):
        mean_loss([(0.0, 0.0)])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_with_loss_scaling_skipped(value: float) -> None:
    names, norms = ["u", "v"], [1.0, value]
    assert is_usable(7, names, [1.0, 2.0], None)
    with pytest.raises(NonFiniteGradient, match=r"step 7: the gradient of 'v' is infinite or not a number"):
        is_usable(7, names, norms, None)
    assert not is_usable(7, names, norms, LossScale())
    with pytest.raises(NonFiniteGradient, match=r"'v' .*, even with a loss scale of 5"):
        is_usable(7, names, norms, LossScale(2.0**-24))


def test_a_norm_beyond_the_largest_number_is_not_finite() -> None:
    with pytest.raises(NonFiniteGradient, match="the norm of the gradient"):
        is_usable(0, ["u", "v"], [3e38, 3e38], None)


@pytest.mark.parametrize("numerics", [ExactSum, FastSum])
@pytest.mark.parametrize("exponent", [-30, 16, 40])
def test_a_power_of_two_on_the_loss_is_divided_out_exactly(numerics: type, exponent: int) -> None:
    parts = gradients(5, 4)
    scale = 2.0**exponent

    def summed_with(factor: float) -> dict[str, Tensor]:
        total = numerics(SHAPES, dict.fromkeys(SHAPES, 5)) if numerics is ExactSum else numerics(SHAPES)
        scales: dict[str, float] = {}
        for _ in range(2):
            total.reset(scales)
            for part in parts:
                for name, gradient in part.items():
                    total.add(name, gradient * factor)
            totals = total.totals(3.0 * factor)
            scales = dict(totals.scales)
        return dict(totals.gradients)

    plain, scaled = summed_with(1.0), summed_with(scale)
    assert all(torch.equal(plain[name], scaled[name]) for name in SHAPES)
