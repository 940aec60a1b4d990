"""Memory layout: a section sees that of the trace, so that views, copies and writes are those of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import WIDTH, agree, training_of
from makara.model.errors import UntraceableModel
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import split
from makara.model.partition.places import crossing_bytes
from makara.model.tracing.trace import trace
from makara.worker.sections.ranges import RangeRuntime
from torch import Tensor, nn


class Layered(nn.Module):
    """Two layers and what a case puts between them, as [samples, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
        self.register_buffer("table", torch.arange(16.0).reshape(WIDTH, WIDTH).t())
        self.register_buffer("part", torch.arange(32.0).reshape(WIDTH, 8)[:, :WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 2)
        return self.last(self.between(h).reshape(-1, WIDTH))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class TurnedBuffer(Layered):
    def between(self, h: Tensor) -> Tensor:
        table = self.table.contiguous()
        table[0] = table[0] + 1
        return h + table[0].view(2, 2)


class PartOfABuffer(Layered):
    def between(self, h: Tensor) -> Tensor:
        part = self.part.reshape(16)
        part[0] = part[0] + 1
        return h + self.part[0].view(2, 2) * part[0]


class ConstantNoise(Layered):
    def between(self, h: Tensor) -> Tensor:
        fixed = torch.full_like(h, 2.0).cumsum(1).transpose(1, 2)
        copy = fixed.contiguous()
        copy[:, 0] = 5
        return h + copy - 2 * fixed


class Turned(Layered):
    def between(self, h: Tensor) -> Tensor:
        turned = torch.tanh(h).transpose(1, 2)
        copy = turned.contiguous()
        copy[:, 0] = 5
        return turned - copy * h


class Slice(Layered):
    def between(self, h: Tensor) -> Tensor:
        part = torch.tanh(h)[:, :, :1]
        copy = part.contiguous()
        copy[:, 0] = 5
        return part - copy * h


class Repeated(Layered):
    def between(self, h: Tensor) -> Tensor:
        wide = h.sum(1, keepdim=True).expand(-1, 2, 2)
        copy = wide.reshape(-1, 4)
        copy[:, 0] = 5
        return wide - copy.view_as(h)


class LayoutPassedOn(Layered):
    """The layout reaches a copy through operations, and the original is written."""

    def between(self, h: Tensor) -> Tensor:
        turned = torch.tanh(h.transpose(1, 2)) + 1
        copy = turned.contiguous()
        turned[:, 0] = 5
        return turned - copy * h


class View(Layered):
    def between(self, h: Tensor) -> Tensor:
        turned = torch.tanh(h.transpose(1, 2))
        return turned.transpose(1, 2).view(-1, WIDTH) @ self.turned.t().view(-1)[:WIDTH].view(
            WIDTH, 1
        ) + h.view(-1, WIDTH)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.view(-1, 1, 2, 2)).contiguous(memory_format=torch.channels_last)
        rows = torch.relu(h).permute(0, 2, 3, 1).view(-1, 8)
        return self.last(h) + rows.sum()


class Conjugate(Layered):
    def between(self, h: Tensor) -> Tensor:
        number = torch.view_as_complex(h).conj()
        whole = number.resolve_conj()
        lower = number.imag
        return torch.stack([lower, torch.tanh(number.real) * whole.imag], -1) + lower.unsqueeze(-1)


class Strided(Layered):
    """Reads memory by strides of its own; those of the second are beyond what it is given."""

    def between(self, h: Tensor) -> Tensor:
        turned = torch.tanh(h.transpose(0, 1))
        part = torch.tanh(h + 1)[:, 1:, :1]
        rows = turned.as_strided((8, 2), (2, 1))
        beyond = part.as_strided((4, 2), (1, 4), 3)
        weights = self.turned.as_strided((2, 2), (1, 4), 1)
        return h * rows[1].sum() + beyond.sum(0) * weights


class StridedPart(Layered):
    def between(self, h: Tensor) -> Tensor:
        return h + self.part.as_strided((2, 2), (8, 1))


CASES = (
    Conjugate,
    Strided,
    TurnedBuffer,
    PartOfABuffer,
    ConstantNoise,
    Turned,
    Slice,
    Repeated,
    LayoutPassedOn,
    View,
    ChannelsLast,
)


@pytest.mark.parametrize("model", CASES)
def test_sections_give_what_eager_gives_wherever_the_model_is_cut(model: Callable[[], nn.Module]) -> None:
    training = training_of(model)
    traced = trace(training, 4, 1)
    agree(training, traced=traced)
    nodes = compute_nodes(traced.graph)
    places = [place for place, size in enumerate(crossing_bytes(nodes, ())) if place and size is not None]
    for place in places:
        agree(training, [place], traced=traced)
    agree(training, places, traced=traced)


@pytest.mark.parametrize("model", [TurnedBuffer, PartOfABuffer])
def test_a_copy_of_a_buffer_is_written_and_the_buffer_stays(model: Callable[[], nn.Module]) -> None:
    training = training_of(model)
    chain = agree(training)
    runtime = RangeRuntime(chain, training, 1)
    runtime.host(0)
    x = {"x": torch.rand(4, WIDTH)}
    losses = {runtime.forward(0, 0, 0, 1, {}, x, keep=False).piece for _ in range(3)}
    assert len(losses) == 1
    for name, buffer in runtime.sections[0].buffers.items():
        assert torch.equal(buffer, chain.traced.initial(name))


def test_what_crosses_a_cut_is_complete_in_its_bytes() -> None:
    training = training_of(Conjugate)
    traced = trace(training, 4, 1)
    [place] = [n for n, node in enumerate(compute_nodes(traced.graph)) if "resolve_conj" in str(node.target)]
    chain = split(traced, [place])
    runtime = RangeRuntime(chain, training, 1)
    runtime.host(0)
    values = runtime.forward(0, 0, 0, 1, {}, {"x": torch.rand(4, WIDTH)}, keep=False).values
    assert [value.dtype for value in values.values()] == [torch.complex64]
    for value in values.values():
        sent = torch.empty_like(value).set_(value.untyped_storage(), 0, value.shape)
        assert torch.equal(sent, value)


def test_strides_over_a_part_of_a_larger_tensor_are_refused() -> None:
    with pytest.raises(UntraceableModel, match="'part' by as_strided") as told:
        trace(training_of(StridedPart), 4, 1)
    assert "self.part.as_strided((2, 2), (8, 1))" in str(told.value)
