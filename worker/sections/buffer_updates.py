"""Running statistics: buffers whose new value every micro-batch computes from the step's initial one.

After a step such a buffer is the mean of its new values, in the order of the micro-batches, with both
numerics; a counter advances once. Nothing changes before the commit, and a skipped step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .grad_sums import AllReduce, over_hosts, spans


class RunningSum:
    """The new values of a bucket's buffers in one attempt, of one worker's micro-batches.

    One worker contributes each micro-batch's values and the others zeros, so the sum is exact. It takes 8
    bytes per element and micro-batch: 16·C·N for a batch norm of C channels.
    """

    def __init__(
        self, buffers: Mapping[str, Tensor], num_micro_batches: int, device: torch.device | str = "cpu"
    ) -> None:
        """`buffers`: tensors, perhaps fake, with shapes and types of the bucket's buffers."""
        self.names = tuple(buffers)
        self.num_micro_batches = num_micro_batches
        self._forms = {name: (tuple(value.shape), value.dtype) for name, value in buffers.items()}
        means = {name: value.numel() for name, value in buffers.items() if value.is_floating_point()}
        counters = {name: value.numel() for name, value in buffers.items() if name not in means}
        width = sum(means.values())
        self.means = torch.zeros(num_micro_batches, width, dtype=torch.float64, device=device)
        self.counters = torch.zeros(sum(counters.values()), dtype=torch.int64, device=device)
        self._spans = spans(means) | spans(counters)

    def reset(self) -> None:
        """Begin an attempt."""
        self.means.zero_()
        self.counters.zero_()

    def add(self, micro_batch: int, updates: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's new values; ignores those of other buckets."""
        for name, value in updates.items():
            if name not in self._forms:
                continue
            if value.is_floating_point():
                self.means[micro_batch, self._spans[name]] = value.reshape(-1).double()
            elif micro_batch == 0:
                self.counters[self._spans[name]] = value.reshape(-1).long()

    def remove(self, micro_batches: Iterable[int], names: Iterable[str]) -> None:
        """Take the values of these buffers from these micro-batches out again."""
        taken = list(micro_batches)
        for name in names:
            if self._forms[name][1].is_floating_point:
                self.means[taken, self._spans[name]] = 0.0
            elif 0 in taken:
                self.counters[self._spans[name]] = 0

    def merge(self, other: RunningSum) -> None:
        """Add the values of other micro-batches."""
        self.means.add_(other.means)
        self.counters.add_(other.counters)

    def tensors(self) -> dict[str, Tensor]:
        """What the sum consists of, in place."""
        return {"means": self.means, "counters": self.counters}

    def finalise(self, over: AllReduce | None = None) -> dict[str, Tensor]:
        """Each buffer's value after the step, from all hosts' values (`over`: None if there is one). All
        hosts call it; the worker's own values stay as they are."""
        all_reduce = None if over is None else over.sum
        means, counters = over_hosts(self.means, all_reduce), over_hosts(self.counters, all_reduce)
        result: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._forms.items():
            if dtype.is_floating_point:
                flat = combine(list(means[:, self._spans[name]]))
            else:
                flat = counters[self._spans[name]]
            result[name] = flat.view(shape).to(dtype, copy=True)
        return result


def combine(values: Sequence[Tensor]) -> Tensor:
    """Combine each micro-batch's new value, in the order of the micro-batches, into the step's.

    Floating point: the mean, summed in float64 from +0 and rounded once, so that the sign of a zero does not
    matter; if all values are equal, that value. Anything else is a counter, which advances once a step: the
    value of micro-batch 0.
    """
    first = values[0]
    if not first.is_floating_point():
        return first.clone()
    whole = first.double()
    total = torch.zeros_like(whole)
    alike = torch.ones_like(whole, dtype=torch.bool)
    for value in values:
        total += value
        alike &= value.double() == whole
    return torch.where(alike, whole + 0.0, total / len(values)).to(first.dtype)


def running_bytes(buffers: Mapping[str, Tensor], num_micro_batches: int) -> int:
    """Bytes of a `RunningSum`."""
    values = buffers.values()
    return 8 * sum(v.numel() * (num_micro_batches if v.is_floating_point() else 1) for v in values)
