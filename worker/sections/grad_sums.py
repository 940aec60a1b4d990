"""Sums of micro-batch gradients: `exact` in 64-bit fixed point, `fast` in floating point.

Exact. Each micro-batch's gradient g of a tensor becomes the integers round(g·S), S a power of two; the
integers are summed here and all-reduced. Integer addition is associative, so no order, grouping or routing
changes a bit. With n contributions in all, S is such that a contribution 2^HEADROOM_BITS times as large as
the largest of the last step still keeps |g|·S <= 2^62/n, so that the sum stays below 2^62. A step whose
gradient is zero leaves the scale unchanged.
Error bound: S > 2^62 / (n · 2^(HEADROOM_BITS+2) · max|g|). Rounding changes each contribution by at most
1/(2S), so the sum by at most n/(2S) < n^2 · 2^(HEADROOM_BITS-61) · max|g|: for n = 64, 2^-39 of the largest
|g|. The sum is then converted once to float64 (relative error 2^-53), divided, and rounded once to float32.

A worker keeps its own sums until the step is committed, for should the step be broken off, they still count:
sums over workers are formed in copies.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...model.errors import UserCodeError
from ...model.partition.partition import Sections

HEADROOM_BITS = 10  # a gradient may grow 1024-fold from one step to the next before a step has to be redone
_CHUNK = 1 << 16  # elements converted at a time: the three temporaries fit into a CPU's second-level cache
_CHUNK_ON_GPU = 1 << 22  # few long kernels; in chunks of 2^16 an H200 takes 23 times as long
_REDUCED_AT_ONCE = 1 << 22  # elements of a copy; a constant, so that all hosts issue the same collectives


class AllReduce(Protocol):
    """All-reduces in place over the hosts of a bucket."""

    def sum(self, tensor: Tensor) -> None: ...

    def max(self, tensor: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Totals:
    """A bucket's gradients over all micro-batches and hosts."""

    gradients: Mapping[str, Tensor]
    """Sum / divisor as float32, in the shape of the parameter; empty if the sum overflowed."""
    overflowed: bool  # the fixed point was too narrow, or unknown: the step has to be redone with `scales`
    non_finite: frozenset[str] = frozenset()
    """Names with an infinite or NaN contribution that the sum itself does not show."""
    scales: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the next attempt or step. A gradient that is zero or not finite leaves its scale unchanged."""

    def norms(self) -> dict[str, float]:
        """{parameter: its gradient's norm}; infinite if a micro-batch's gradient was not finite."""
        norms = {name: float(parameter_norm(gradient)) for name, gradient in self.gradients.items()}
        return norms | dict.fromkeys(self.non_finite, math.inf)


class GradientSum(ABC):
    """The sum of one bucket's gradients over one worker's micro-batches."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.names = tuple(shapes)
        self._shapes = shapes
        self._spans = spans({name: math.prod(shape) for name, shape in shapes.items()})
        size = max((span.stop for span in self._spans.values()), default=0)
        self.buffer = torch.zeros(size, dtype=dtype, device=device)  # flat
        self._views = {n: self.buffer[span].view(tuple(shapes[n])) for n, span in self._spans.items()}

    def reset(self, scales: Mapping[str, float]) -> None:
        """Begin an attempt with these scales (`scales/<name>`; absent or 0: not known yet)."""
        self.buffer.zero_()

    @abstractmethod
    def add(self, name: str, gradient: Tensor) -> None:
        """Add one micro-batch's gradient."""

    def merge(self, other: GradientSum) -> None:
        """Add another sum of the same parameters and scales, of other contributions."""
        self.buffer.add_(other.buffer)

    def tensors(self) -> dict[str, Tensor]:
        """What the sum consists of, in place."""
        return {"gradients": self.buffer}

    @abstractmethod
    def totals(self, divisor: float, over: AllReduce | None = None) -> Totals:
        """The sum over all hosts, divided; the worker's own sum stays as it is. All hosts call it.

        `divisor`: the step's total weight, times the loss scale. `over`: None if there is one host.
        """

    def divided(self, divisor: float, over: AllReduce | None = None) -> dict[str, Tensor]:
        """`Totals.gradients`, which are wrong if the sum overflowed."""
        all_reduce = None if over is None else over.sum
        device = self.buffer.device
        result = {
            n: torch.empty(shape, dtype=torch.float32, device=device) for n, shape in self._shapes.items()
        }
        for start in range(0, self.buffer.numel(), _REDUCED_AT_ONCE):
            summed = over_hosts(self.buffer[start : start + _REDUCED_AT_ONCE], all_reduce)
            for name, span in self._spans.items():
                begin, stop = max(span.start, start), min(span.stop, start + summed.numel())
                if begin < stop:
                    into = result[name].view(-1)[begin - span.start : stop - span.start]
                    self._divide(name, summed[begin - start : stop - start], divisor, into)
        return result

    @abstractmethod
    def _divide(self, name: str, summed: Tensor, divisor: float, into: Tensor) -> None:
        """Write `summed`, elements of a parameter's sum over all hosts, as float32."""


def new_sum(
    chain: Sections,
    names: Sequence[str],
    num_micro_batches: int,
    numerics: Literal["exact", "fast"],
    device: torch.device | str = "cpu",
) -> GradientSum:
    """Make an empty sum for the parameters `names` of a model.

    With `exact`, the grouping of parameters into sums and the number of workers do not change a bit.
    """
    shapes = {name: tuple(chain.traced.tensors[name].shape) for name in names}
    if numerics == "fast":
        return FastSum(shapes, device)
    contributions = {name: num_micro_batches * len(chain.shared.get(name, (0,))) for name in names}
    return ExactSum(shapes, contributions, device)


class ExactSum(GradientSum):
    """`numerics: exact`; see the module's docstring."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        contributions: Mapping[str, int],
        device: torch.device | str = "cpu",
    ) -> None:
        """`contributions`: the number of gradients that each parameter gets in a step, over all workers and
        sections."""
        super().__init__(shapes, torch.int64, device)
        self.maxima = torch.zeros(len(shapes), dtype=torch.float64, device=device)
        """[len(names)], the largest |g| of a single contribution; infinite if one is not finite."""
        self.scales = dict.fromkeys(shapes, 0.0)
        self._limits = [2.0**62 / contributions[name] for name in shapes]
        self._rows = {name: row for row, name in enumerate(shapes)}
        self._chunk = _CHUNK if self.buffer.device.type == "cpu" else _CHUNK_ON_GPU

    def reset(self, scales: Mapping[str, float]) -> None:
        super().reset(scales)
        self.maxima.zero_()
        self.scales = {name: scales.get(name, 0.0) for name in self.names}

    def merge(self, other: GradientSum) -> None:
        assert isinstance(other, ExactSum)
        assert other.scales == self.scales, "sums of other scales are of other numbers"
        super().merge(other)
        self.maxima = torch.maximum(self.maxima, other.maxima)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "maxima": self.maxima}

    def add(self, name: str, gradient: Tensor) -> None:
        row = self._rows[name]
        low, high = torch.aminmax(gradient)
        largest = torch.maximum(-low, high).double().nan_to_num_(nan=math.inf, posinf=math.inf)
        self.maxima[row] = torch.maximum(self.maxima[row], largest)
        scale = self.scales[name]
        if scale == 0.0:
            return  # this attempt only determines the maximum
        flat, total = gradient.reshape(-1), self._views[name].view(-1)
        for start in range(0, flat.numel(), self._chunk):
            chunk = flat[start : start + self._chunk].double().mul_(scale).round_()
            # Beyond the limit the conversion may give any integer; the sum is then not used.
            total[start : start + self._chunk].add_(chunk.to(torch.int64))

    def totals(self, divisor: float, over: AllReduce | None = None) -> Totals:
        maxima = over_hosts(self.maxima, None if over is None else over.max).tolist()
        rows = list(zip(self.names, maxima, self.scales.values(), self._limits, strict=True))
        overflowed = any(
            not math.isfinite(largest) or largest * scale > limit or (scale == 0.0 and largest > 0.0)
            for _, largest, scale, limit in rows
        )
        return Totals(
            {} if overflowed else self.divided(divisor, over),
            overflowed,
            non_finite=frozenset(name for name, largest, _, _ in rows if not math.isfinite(largest)),
            scales={
                name: _scale(largest, limit) if 0.0 < largest < math.inf else scale
                for name, largest, scale, limit in rows
            },
        )

    def _divide(self, name: str, summed: Tensor, divisor: float, into: Tensor) -> None:
        scale = self.scales[name] or 1.0  # an unknown scale without overflow: all contributions are zero
        for start in range(0, summed.numel(), self._chunk):
            piece = slice(start, start + self._chunk)
            into[piece] = summed[piece].double().div_(scale).div_(divisor)


class FastSum(GradientSum):
    """`numerics: fast`: float32, in the order of arrival."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], device: torch.device | str = "cpu") -> None:
        super().__init__(shapes, torch.float32, device)

    def add(self, name: str, gradient: Tensor) -> None:
        self._views[name].add_(gradient)

    def totals(self, divisor: float, over: AllReduce | None = None) -> Totals:
        return Totals(self.divided(divisor, over), overflowed=False)

    def _divide(self, name: str, summed: Tensor, divisor: float, into: Tensor) -> None:
        torch.div(summed, divisor, out=into)


def spans(sizes: Mapping[str, int]) -> dict[str, slice[int, int, None]]:
    """Where each of these lies in a flat tensor of all, in order."""
    stops = itertools.accumulate(sizes.values(), initial=0)
    return {name: slice(*span) for name, span in zip(sizes, itertools.pairwise(stops), strict=True)}


def over_hosts(own: Tensor, all_reduce: Callable[[Tensor], None] | None) -> Tensor:
    """Reduced in a copy; the tensor itself if there is one host."""
    if all_reduce is None or not own.numel():
        return own
    copy = own.clone()
    all_reduce(copy)
    return copy


def mean_loss(pieces: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(loss, total weight) from each micro-batch's (sum, weight), in the order of the micro-batches."""
    total = weight = 0.0
    for piece_sum, piece_weight in pieces:
        total += piece_sum
        weight += piece_weight
    if weight <= 0.0:
        raise UserCodeError(
            f"loss: the weights of the step's micro-batches add up to {weight}; expected more than 0"
        )
    return total / weight, weight


def parameter_norm(gradient: Tensor) -> Tensor:
    """The 2-norm of one parameter's gradient, float32 scalar."""
    return torch.linalg.vector_norm(gradient, 2.0)


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm of the whole gradient, from the parameters' norms in the model's order.

    Equals what `torch.nn.utils.clip_grad_norm_` returns, bit for bit.
    """
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(torch.float32) for norm in norms]), 2.0)


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """The factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients by (1 when within)."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _scale(largest: float, limit: float) -> float:
    # frexp: largest < 2^exponent, so largest · 2^(bits - exponent) < 2^bits.
    _, exponent = math.frexp(largest)
    bits = math.frexp(limit)[1] - 1 - HEADROOM_BITS
    return math.ldexp(1.0, max(-1000, min(1000, bits - exponent)))
