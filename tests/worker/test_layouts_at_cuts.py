"""Gradients do not depend on where a model is cut, whatever memory layout flows back over the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from coupled_models import sound
from makara.model.data import Batches
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.norms import settle_group_norms
from makara.model.tracing.trace import TracedModel, trace
from makara.worker import Training
from makara.worker.check.check import CheckSettings, check
from makara.worker.check.eager import EagerModel
from makara.worker.check.findings import difference
from makara.worker.check.sectioned_step import SectionedModel
from torch import Tensor, fx, nn

CHANNELS, SIDE = 8, 5


class Tokens(nn.Module):
    """Convolves and norms a map, and mixes channels of its pixels, as networks between a CNN and a
    transformer do."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), norm(CHANNELS)
        self.mix = nn.Sequential(nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:  # BHWC, as what it returns
        b, h, w, c = x.shape
        tokens = self.norm(self.conv(x.permute(0, 3, 1, 2))).reshape(b, c, h * w).transpose(1, 2)
        return (tokens + self.mix(tokens)).view(b, h, w, c)


class Mixed(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tokens(norm) for _ in range(2))
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, image: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image)
        return self.head(image.mean((1, 2)))


class Images:
    def __init__(self, height: int = SIDE) -> None:
        self.height = height

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        image = torch.randn(self.height, SIDE, CHANNELS, generator=numbers)
        return {"image": image, "label": torch.tensor(index % 3)}


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.double(), batch["label"])


def mixed(norm: Callable[[int], nn.Module], height: int = SIDE) -> Training:
    return sound(model=lambda: Mixed(norm), loss=loss, dataset=lambda: Images(height))


@cache
def traced(norm: Callable[[int], nn.Module], height: int, m: int) -> tuple[Training, TracedModel]:
    training = mixed(norm, height)
    return training, trace(training, m)


class PlainNorm(nn.Module):
    """Norms over `dims` by elementary operations, with the parameters of torch's layer."""

    def __init__(self, dims: tuple[int, ...], affine: bool) -> None:
        super().__init__()
        self.dims = dims
        if affine:
            self.weight, self.bias = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(self.dims, keepdim=True)
        normed = centred / (centred.square().mean(self.dims, keepdim=True) + 1e-5).sqrt()
        parameters = list(self.parameters())
        return (
            normed if not parameters else normed * parameters[0][:, None, None] + parameters[1][:, None, None]
        )


def by_channel(channels: int) -> nn.Module:
    return nn.GroupNorm(channels, channels)


def frozen_by_channel(channels: int) -> nn.Module:
    """What comes before has no gradient, so that of the norm's input is not wanted."""
    return nn.Sequential(Detached(), by_channel(channels))


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def in_float64(
    training: Training, model: TracedModel, batches: Batches, norm: Callable[[int], nn.Module]
) -> dict[str, Tensor]:
    """Gradients by elementary operations: torch's own layers have the fault in float64, too."""
    batchwise = norm is nn.BatchNorm2d

    def plain(_: int) -> nn.Module:
        return PlainNorm((0, 2, 3) if batchwise else (2, 3), affine=norm is not nn.InstanceNorm2d)

    wide = replace(training, model=lambda: Mixed(plain).double())
    return EagerModel(wide, model, Doubled(batches)).step(0).gradients


class Doubled(Batches):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def num_micro_batches(self) -> int:
        return self._batches.num_micro_batches

    def micro_batch(self, step: int, i: int) -> dict[str, Tensor]:
        given = self._batches.micro_batch(step, i)
        return {name: value.double() if value.is_floating_point() else value for name, value in given.items()}


@pytest.mark.parametrize(
    ("norm", "height", "m"),
    [
        (nn.BatchNorm2d, SIDE, 1),
        (nn.BatchNorm2d, 1, 2),
        (nn.InstanceNorm2d, SIDE, 1),
        (by_channel, SIDE, 1),
    ],
    ids=["one sample", "a height of one", "by sample", "by group"],
)
def test_gradients_are_right_with_a_cut_at_any_place(
    norm: Callable[[int], nn.Module], height: int, m: int
) -> None:
    """Found: torch misread the gradient of a batch norm that came over a cut, for one sample (tiny_vit); a
    group norm of channels-last memory ended the process where the gradient of its input was not wanted."""
    training, model = traced(norm, height, m)
    batches = Batches(training.dataset(), 0, m, m)
    expected = in_float64(training, model, batches, norm)
    for count in (1, 2, 3, 5):
        chain = split(model, choose_cuts(model, count))
        found = SectionedModel(chain, training, batches, 0).step().gradients
        apart = {name: difference(value.double(), expected[name]) for name, value in found.items()}
        assert max(apart.values()) < 1e-4, (count, apart)


def test_such_a_model_passes_the_check() -> None:
    """Found: its gradients in pieces were blamed on a custom backward."""
    told = check(mixed(nn.BatchNorm2d), CheckSettings(num_sections=4), Path(__file__).parent)
    assert told["findings"] == []


def test_a_group_norm_behind_frozen_layers_passes_the_check() -> None:
    """Found: the process ended by a signal, in your module and in sections."""
    told = check(mixed(frozen_by_channel), CheckSettings(num_sections=3), Path(__file__).parent)
    assert told["findings"] == []


@pytest.mark.parametrize(
    "slices", [(slice(None),), (slice(None), slice(0, 4)), (..., slice(0, None, 2))], ids=str
)
def test_a_group_norm_keeps_the_layout_that_the_trace_saw(slices: tuple[Any, ...]) -> None:
    x = torch.randn(2, CHANNELS, SIDE, 6).contiguous(memory_format=torch.channels_last)[slices]
    module = fx.symbolic_trace(nn.Identity())
    module.graph = fx.Graph()
    given = module.graph.placeholder("x")
    module.graph.output(module.graph.call_function(torch.ops.aten.group_norm.default, (given, 2)))
    settle_group_norms(module.graph)
    module.recompile()
    expected, found = torch.group_norm(x, 2), module(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
