"""The report of a dry run: findings, and how far two tensors that should be equal are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Largest difference between fp32 runs, as a part of the tensor's largest magnitude. Both run the same
kernels, on memory of another form and in another order of sums: a few units of 2^-24, grown by depth."""

NOISE = 1e-7
"""Part of the model's largest gradient below which a difference says nothing: a gradient that is zero by
symmetry (a key's bias under softmax) comes out as the rounding (2^-24 = 6e-8) of terms that cancel."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why training in pieces would not be what the user's code does on one device."""

    where: str  # the field of Training, or the model's forward
    differs: str  # what differs and, probably, why; a sentence without its full stop
    remedy: str  # what to declare or change; a sentence without its full stop

    def __str__(self) -> str:
        return f"{self.where}: {self.differs}. {self.remedy}."


@dataclass(slots=True)
class Report:
    """The result of a comparison. `largest`: the largest relative difference of each kind of tensor.
    `batch_coupled`: where the samples of a micro-batch depend on each other, in the loss or in forward."""

    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])
    largest: dict[str, float] = field(default_factory=dict[str, float])
    random_operations: dict[str, int] = field(default_factory=dict[str, int])
    batch_coupled: str | None = None

    def find(self, where: str, differs: str, remedy: str) -> None:
        self.findings.append(Finding(where, differs, remedy))

    def blames(self, where: str) -> bool:
        return any(finding.where == where for finding in self.findings)


def difference(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """max|one - other| over the largest magnitude of either, which counts as `floor` at least; 0 when equal.

    Infinite when the shapes differ, or one holds a value that is not finite where the other holds another.
    """
    if one.shape != other.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    one, other = one.detach(), other.detach()
    if not one.is_floating_point() or not other.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    apart = float((one - other).abs().max())
    if not math.isfinite(apart):
        return 0.0 if torch.allclose(one, other, rtol=TOLERANCE, atol=floor, equal_nan=True) else math.inf
    largest = max(float(one.abs().max()), float(other.abs().max()), floor)
    return apart / largest if apart > 0.0 else 0.0


def differences(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, float]:
    """How far the tensors of each name are apart. A name that one side lacks counts as zeros."""
    found: dict[str, float] = {}
    for name in {**one, **other}:
        missing = torch.zeros_like(one[name] if name in one else other[name])
        found[name] = difference(one.get(name, missing), other.get(name, missing), floor)
    return found


def largest_magnitude(tensors: Iterable[Tensor]) -> float:
    """Over all finite values; 0 when there are none."""
    found = [float(t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in tensors if t.numel()]
    return max(found, default=0.0)


def noise_floor(tensors: Iterable[Tensor]) -> float:
    """The magnitude below which differences of these tensors say nothing."""
    return largest_magnitude(tensors) * NOISE / TOLERANCE


def some(names: Iterable[str], shown: int = 3) -> str:
    """'a', 'b', 'c' and 5 more."""
    found = list(names)
    text = ", ".join(repr(name) for name in found[:shown])
    return text + (f" and {len(found) - shown} more" if len(found) > shown else "")
