"""Models in the sizes of real ones, whose layers sleep for the time that they would compute.

A layer's tensors have `SCALE` times the bytes that they stand for: its parameters, and what it hands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import Sections, split
from makara.model.tracing.trace import trace
from makara.worker import Training
from torch import Tensor, fx, nn

from ..sleepy import Points
from .device import begin, end, weighed

SCALE = 2e-4
"""Of all tensors and of all link rates, so that times are those of the full sizes."""
SEED = 3
MICROBATCH_SIZE = 4
_WIDTH = 8  # of samples and of the model's output
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Layer:
    """A section: its times, and its bytes at full size for one micro-batch.

    `weight_s`: what the gradients of its parameters take beside `backward_s`, apart from it.
    """

    forward_s: float
    backward_s: float
    parameter_bytes: float
    output_bytes: float
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Emulated:
    """A model, with a section for each of its layers."""

    name: str
    layers: tuple[Layer, ...]

    def training(self, samples: int) -> Training:
        """What a user would hand over to train it."""
        return Training(
            model=lambda: _Model(self.layers),
            loss=lambda output, batch: F.mse_loss(output, batch["y"]),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
            dataset=lambda: Points(samples, _WIDTH),
        )

    def sections(self) -> Sections:
        """The traced model, cut behind each layer."""
        traced = trace(self.training(MICROBATCH_SIZE), MICROBATCH_SIZE, SEED)
        ends = [place for place, node in enumerate(compute_nodes(traced.graph)) if _is_end(node)]
        return split(traced, [place + 1 for place in ends[:-1]])


def transformer(forward_s: float, num_sections: int = 12) -> Emulated:
    """GPT-2 medium at m = 8: equal sections of a few layers, `forward_s` each."""
    size = 12 / num_sections
    equal = Layer(forward_s, 2 * forward_s, parameter_bytes=size * 100 * _MB, output_bytes=16.8 * _MB)
    return Emulated("transformer", (equal,) * num_sections)


def uneven(forward_s: float, num_pairs: int = 4) -> Emulated:
    """A large vocabulary around pairs of blocks of two kinds: a light embedding, which takes `forward_s`, and
    a heavy head, both with many parameters."""
    light = Layer(1.4 * forward_s, 2.6 * forward_s, parameter_bytes=50 * _MB, output_bytes=8.4 * _MB)
    heavy = Layer(2.0 * forward_s, 4.4 * forward_s, parameter_bytes=80 * _MB, output_bytes=8.4 * _MB)
    embedding = Layer(forward_s, 1.2 * forward_s, parameter_bytes=206 * _MB, output_bytes=8.4 * _MB)
    head = Layer(3.2 * forward_s, 5.8 * forward_s, parameter_bytes=206 * _MB, output_bytes=0.0)
    return Emulated("uneven", (embedding, *(light, heavy) * num_pairs, head))


def pyramid(forward_s: float) -> Emulated:
    """As of a convolutional network: what is handed on shrinks with depth and parameters grow; the last of
    eight sections takes `forward_s`."""
    rows = zip(
        (2.4, 2.0, 1.8, 1.6, 1.4, 1.2, 1.2, 1.0),  # times forward_s
        (48, 48, 24, 24, 12, 12, 6, 0),  # MB that are handed on
        (2, 4, 8, 16, 32, 64, 128, 160),  # MB of parameters
        strict=True,
    )
    return Emulated(
        "pyramid",
        tuple(
            Layer(times * forward_s, 2 * times * forward_s, parameter_bytes=own * _MB, output_bytes=out * _MB)
            for times, out, own in rows
        ),
    )


def slots(slot_s: float, depth: int) -> Emulated:
    """F = I = W = `slot_s`, by stage. Before the first stage's layer comes one that takes no time, so that
    the first stage has an I, too: a first section has none, for its inputs get no gradient."""
    layer = Layer(slot_s, slot_s, parameter_bytes=_MB, output_bytes=_MB, weight_s=slot_s)
    entry = Layer(0.0, 0.0, parameter_bytes=_MB, output_bytes=_MB)
    return Emulated("slots", (entry, *(layer,) * depth))


class _Model(nn.Module):
    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        last = len(layers) - 1
        self.layers = nn.ModuleList(
            _Asleep(layer, is_last=index == last) for index, layer in enumerate(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Asleep(nn.Module):
    """Hardly any arithmetic, in which all parameters have a part, and the time of a real layer."""

    def __init__(self, layer: Layer, *, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_elements(layer.parameter_bytes)))
        self.width = _WIDTH if is_last else _elements(layer.output_bytes / MICROBATCH_SIZE)
        self.forward_s, self.backward_s = layer.forward_s, layer.backward_s
        self.weight_s = layer.weight_s

    def forward(self, x: Tensor) -> Tensor:
        weight = weighed(self.weight, self.weight_s) if self.weight_s else self.weight
        level = begin(x.mean(dim=1, keepdim=True) + weight.mean(), self.backward_s)
        return end(level.repeat(1, self.width), self.forward_s)


def _elements(size_bytes: float) -> int:
    """Of float32, at the scale."""
    return max(1, round(SCALE * size_bytes / 4))


def _is_end(node: fx.Node) -> bool:
    return node.target is torch.ops.makara_emulated.end.default
