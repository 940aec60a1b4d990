"""The user's own no_grad and autocast regions: cut through, moved to another device, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import agree
from in_process import same_bits
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.regions import set_device
from makara.model.tracing.trace import TracedModel, trace
from makara.model.training import Training
from torch import Tensor, fx, nn
from whole_runtime import gradients_of, whole_runtime

WIDTH = 8


class Rows:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, WIDTH) * (index + 1)}


class Silenced(nn.Module):
    """no_grad in the ways that people write it: reading, writing, within and around other regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.unreached = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
            low, high = self.unreached(x).chunk(2, dim=1)
            with torch.enable_grad():
                y = self.layers[1](torch.cat([high, low], 1))
            x.add_(0.25)
        x = torch.tanh(self.layers[2](x)) + y + self.ema
        filled = torch.zeros_like(x)
        filled[:, 1:] = self.layers[3](x)[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            shift = self.layers[4](x)
        return self.layers[4](filled) * 2 + shift.float() + x


class Mixed(nn.Module):
    """Autocast over several layers, off again for some of them, for a device that is not here, and by a
    decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
            with torch.autocast(x.device.type, enabled=False):
                x = self.layers[2](x.float())
            x = x + torch.tanh(self.layers[3](x))
        return self.tail(x)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def tail(self, x: Tensor) -> Tensor:
        return self.layers[5](torch.relu(self.layers[4](x))).float()


class OfCuda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(WIDTH, device=x.device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.layer(x)
        with torch.cuda.amp.autocast():  # pyright: ignore[reportDeprecated]
            x = self.layer(x)
        return x.to("cpu") + places


def training_of(model: Callable[[], nn.Module]) -> Training:
    return Training(
        model=model,
        loss=lambda output, batch: output.float().square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        dataset=Rows,
        average_buffers=["ema"],
    )


@pytest.mark.parametrize("num_sections", [1, 3])
@pytest.mark.parametrize("model", [Silenced, Mixed])
def test_regions_are_those_of_eager(model: type[nn.Module], num_sections: int) -> None:
    training = training_of(model)
    traced = trace(training, 4, 1)
    chain = split(traced, choose_cuts(traced, num_sections))
    runtime = whole_runtime(chain, training, 1)
    x = torch.stack([Rows()[index]["x"] for index in range(4)])
    output = runtime.forward(0, 0, 0, num_sections, {}, {"x": x}, keep=True)
    assert output.piece is not None
    gradients = gradients_of(runtime)
    eager = model()
    eager.load_state_dict({name: traced.initial(name) for name in eager.state_dict()})
    loss = eager(x).float().square().mean()
    loss.backward()
    assert output.piece.loss_sum == pytest.approx(float(loss.detach()), rel=1e-6)
    wanted = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert traced.trainable == wanted.keys()
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
    for name, value in output.updates.items():
        assert same_bits(value, eager.get_buffer(name))


def test_the_users_regions_hold_against_the_jobs_precision() -> None:
    training = training_of(Mixed)
    places = compute_nodes(trace(training, 4, 1, "bf16").graph)
    inside = [place for place, node in enumerate(places) if node.target is torch.ops.aten.linear.default]
    chain = agree(training, inside[2:4], rtol=1e-2, precision="bf16")
    assert [{value.dtype for value in values} for values in chain.crossing] == [{"float32"}, {"float32"}]


class Filling(nn.Module):
    """Gradients flow through memory that was made without any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.zeros_like(x)
        filled[:, 1:] = self.layers[0](x)[:, 1:]
        return self.layers[1](torch.tanh(filled))


def test_what_was_filled_carries_its_gradient_over_a_cut() -> None:
    training = training_of(Filling)
    nodes = compute_nodes(trace(training, 4, 1).graph)
    cut = next(place for place, node in enumerate(nodes) if node.target is torch.ops.aten.tanh.default)
    (crossing,) = agree(training, [cut]).crossing
    assert [value.needs_grad for value in crossing] == [True]


def autocasts(traced: TracedModel) -> list[tuple[torch.dtype, bool] | None]:
    """Of the linear layers, in their order."""
    layers = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return [(r.dtype, r.enabled) if (r := node.meta.get("autocast")) else None for node in sorted(layers)]


def test_the_innermost_region_holds() -> None:
    on, off = (torch.bfloat16, True), (torch.bfloat16, False)
    assert autocasts(trace(training_of(Mixed), 2)) == [on, on, off, on, on, on]


def test_a_cut_may_go_through_a_region() -> None:
    traced = trace(training_of(Mixed), 2)
    nodes = compute_nodes(traced.graph)
    inside = [place for place, node in enumerate(nodes) if node.target is torch.ops.aten.linear.default]
    chain = split(traced, inside[1:])
    kinds = [{value.dtype for value in values} for values in chain.crossing]
    assert kinds == [{"bfloat16"}, {"float32"}, {"float32"}, {"float32"}, {"bfloat16"}]
    for module in chain.modules:
        module.graph.lint()


def test_regions_count_for_the_hash() -> None:
    hashes: set[str] = set()
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):

        class Whole(nn.Linear):
            kind = dtype

            def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
                with torch.autocast("cpu", dtype=self.kind):
                    return super().forward(x).relu()

        hashes.add(trace(training_of(lambda: Whole(WIDTH, WIDTH)), 2).graph_hash)
    assert len(hashes) == 2


def test_a_region_for_cuda_counts_wherever_it_is_traced() -> None:
    with pytest.warns(FutureWarning, match="torch.cuda.amp.autocast"):
        traced = trace(training_of(OfCuda), 2)
    assert autocasts(traced) == [(torch.bfloat16, True), (torch.float16, True)]


def test_a_graph_is_moved_to_another_device() -> None:
    with pytest.warns(FutureWarning, match="torch.cuda.amp.autocast"):
        traced = trace(training_of(OfCuda), 2)
    (module,) = split(traced, []).modules
    assert "cpu" in named_devices(module.graph)
    for node in module.graph.nodes:
        set_device(node, torch.device("cuda", 1))
    module.recompile()
    assert named_devices(module.graph) <= {"cuda:1", "cuda"}
    assert "cpu" not in module.code


def named_devices(graph: fx.Graph) -> set[str]:
    found: set[str] = set()
    for node in graph.nodes:
        leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))  # pyright: ignore
        found |= {str(leaf) for leaf in leaves if isinstance(leaf, torch.device) or leaf in ("cpu", "cuda")}
    return found
