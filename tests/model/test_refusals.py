"""What a trace would drop or bake in is refused by name, with the user's line and a way out."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import WIDTH, agree, training_of
from makara.model.errors import UntraceableModel
from makara.model.tracing.trace import trace
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.utils.checkpoint import checkpoint


class Base(nn.Module):
    """Two layers; a case changes how it is built (`setup`) or what happens between them (`between`)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None
        self.calls = 0
        self.plain = torch.zeros(WIDTH)
        self.setup()

    def setup(self) -> None: ...

    def between(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x)))


def doubled(*arguments: Any) -> Any:
    return tuple(gradient * 2 for gradient in arguments[-1])


def built(setup: Callable[[Any], Any]) -> Callable[[], Base]:
    return lambda: type("Built", (Base,), {"setup": setup})()


def running(between: Callable[[Any, Tensor], Any]) -> Callable[[], Base]:
    return lambda: type("Running", (Base,), {"between": between})()


def refused(model: Callable[[], nn.Module]) -> UntraceableModel:
    with pytest.raises(UntraceableModel) as caught:
        trace(training_of(model), 4)
    return caught.value


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (lambda m: m.first.register_full_backward_hook(doubled), r"'first' \(Linear\) has a backward hook"),
        (lambda m: m.first.register_full_backward_pre_hook(doubled), "a backward hook, doubled"),
        (lambda m: m.first.weight.register_hook(doubled), "'first.weight' has a hook on its gradient"),
        (lambda m: m.first.weight.register_post_accumulate_grad_hook(doubled), "hook on its gradient"),
    ],
)
def test_hooks_on_gradients_are_refused(setup: Callable[[Any], Any], message: str) -> None:
    error = refused(built(setup))
    assert error.call is not None
    assert "def doubled" in error.call
    with pytest.raises(UntraceableModel, match=message):
        raise error


def silenced(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return m.second(x)


def forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x + torch.rand(WIDTH)


def with_saved_hooks(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return torch.tanh(x)


def with_parameter(m: Any, x: Tensor) -> Tensor:
    m.extra = nn.Parameter(torch.ones(WIDTH))
    return x * m.extra


def in_place_weight(m: Any, x: Tensor) -> Tensor:
    m.second.weight.data.clamp_(-1, 1)
    return x


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = (x[:, 0] > 0).long() + 1
    sequence = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(0).expand(2, -1, -1), lengths)
    return m.cells(sequence)[1][-1]


def with_gradient(m: Any, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(x.sum(), m.first.weight)
    return x + slope


def with_slope(m: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda v: m.second(v).square().sum())(x)


def summed_up(m: Any, x: Tensor) -> Tensor:
    return associative_scan(lambda one, other: one + other, x, 0, combine_mode="generic")


def repeated(m: Any, x: Tensor) -> Tensor:
    return while_loop(lambda v: v.sum() < 3, lambda v: (m.second(v),), (x,))[0]


def drawing_in_a_branch(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: nn.functional.dropout(v), lambda v: v * 2.0, (x,))


def drawing_in_a_map(m: Any, x: Tensor) -> Tensor:
    return torch_map(lambda row: nn.functional.dropout(row), x)


def vmap_in_a_branch(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: torch.vmap(torch.tanh)(v), lambda v: v * 2.0, (x,))


@pytest.mark.parametrize(
    ("between", "message", "line"),
    [
        (
            lambda m, x: x.register_hook(doubled),
            "register_hook: a hook on a gradient",
            "x.register_hook(doubled)",
        ),
        (silenced, r"inference_mode.*Use torch\.no_grad", "with torch.inference_mode():"),
        (forked, "fork_rng: a generator", "with torch.random.fork_rng():"),
        (lambda m, x: torch.manual_seed(3), "manual_seed: a generator", "torch.manual_seed(3)"),
        (
            lambda m, x: x + torch.rand(WIDTH, generator=m.generator),
            "a torch.Generator of its own",
            "generator=m.generator",
        ),
        (lambda m, x: x * random.random(), "a random number from Python or NumPy", "x * random.random()"),
        (lambda m, x: x * np.random.rand(), "a random number from Python or NumPy", "x * np.random.rand()"),
        (lambda m, x: x.detach().requires_grad_(), r"requires_grad_\(True\)", "x.detach().requires_grad_()"),
        (
            lambda m, x: x.detach().requires_grad_(),
            "a gradient that is taken there: write its formula",
            "x.detach().requires_grad_()",
        ),
        (packed, "packed sequence.*keep the padded shape", "m.cells(sequence)"),
        (with_gradient, "grad: a gradient that is taken inside", "torch.autograd.grad(x.sum()"),
        (lambda m, x: x.sum().backward(), "backward: a gradient that is taken inside", "x.sum().backward()"),
        (with_saved_hooks, "saved_tensors_hooks", "with torch.autograd.graph.saved_tensors_hooks"),
        (with_parameter, "assigns a Parameter to 'extra'", "m.extra = nn.Parameter"),
        (in_place_weight, "changes 'second.weight' in place", "m.second.weight.data.clamp_(-1, 1)"),
        (lambda m, x: x * m.second.weight[0].data, r"x\.detach\(\) for x\.data", "m.second.weight[0].data"),
        (lambda m, x: m.hidden[0](x), r"hidden\[0\]\.weight, which is not registered", "m.hidden[0](x)"),
        (lambda m, x: torch.vmap(m.second)(x), r"transforms of torch\.func", "torch.vmap(m.second)(x)"),
        (summed_up, r"associative_scan.*cumsum", "associative_scan("),
        (repeated, "while_loop runs as often as the values.*fixed number of turns", "while_loop("),
        (drawing_in_a_branch, "dropout.*draws random numbers in a function", "torch.cond("),
        (drawing_in_a_map, "dropout.*give the numbers to the function", "torch_map("),
        (vmap_in_a_branch, r"transforms of torch\.func", "torch.vmap("),
        (lambda m, x: x * x.sum().item(), "aten.item.default makes a Python number", "x.sum().item()"),
        (lambda m, x: x if x.sum() > 0 else -x, "control flow", "if x.sum() > 0"),
        (lambda m, x: x + torch.ones(WIDTH, device="meta"), "names a device", 'device="meta"'),
        (lambda m, x: x * torch.from_numpy(x.detach().numpy()), "NumPy sees no values", "x.detach().numpy()"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own
def test_what_forward_does_is_refused_with_its_line(
    between: Callable[[Any, Tensor], Any], message: str, line: str
) -> None:
    class Case(Base):
        def setup(self) -> None:
            self.generator = torch.Generator().manual_seed(1)
            self.hidden = [nn.Linear(WIDTH, WIDTH)]
            self.cells = nn.GRU(WIDTH, WIDTH)

        def between(self, x: Tensor) -> Any:
            return between(self, x)

    error = refused(Case)
    assert error.call is not None
    assert line in error.call
    with pytest.raises(UntraceableModel, match=message):
        raise error


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own
def test_a_gradient_by_torch_func_is_refused() -> None:
    with pytest.raises(UntraceableModel, match=r"transforms of torch\.func"):
        raise refused(running(with_slope))


def remembering(m: Any, x: Tensor) -> Tensor:
    y = x if m.kept is None else x + m.kept
    m.kept = x.detach()
    return y


def smoothing(m: Any, x: Tensor) -> Tensor:
    x = x + m.plain
    m.plain = x.mean(0).detach()
    return x


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


def growing(m: Any, x: Tensor) -> Tensor:
    m.kept = [*(m.kept or []), x.detach()]
    return x + sum(m.kept)


def accumulating_where_the_input_is(m: Any, x: Tensor) -> Tensor:
    m.plain.to(x.device).add_(x.mean(0).detach())
    return x


def accumulating(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(1)
    return x


@pytest.mark.parametrize(
    ("between", "name", "line"),
    [
        (remembering, "kept", "m.kept = x.detach()"),
        (smoothing, "plain", "m.plain = x.mean(0).detach()"),
        (counting, "calls", "m.calls += 1"),
        (growing, "kept", "m.kept = [*"),
    ],
)
def test_state_from_call_to_call_is_refused(between: Callable[..., Tensor], name: str, line: str) -> None:
    error = refused(running(between))
    assert f"keeps state from call to call in {name!r}" in str(error)
    assert error.call is not None
    assert line in error.call


def test_a_plain_tensor_that_changes_is_refused() -> None:
    assert "changes 'plain' in place" in str(refused(running(accumulating)))
    assert "changes 'plain' in place" in str(refused(running(accumulating_where_the_input_is)))


def wrapped(m: Any) -> None:
    m.first = nn.DataParallel(m.first)


def averaging(m: Any) -> None:
    m.first = nn.BatchNorm1d(WIDTH, momentum=None)


def sparse(m: Any) -> None:
    m.table = nn.Embedding(3, 3, sparse=True)


def viewed(m: Any) -> None:
    m.other = nn.Parameter(m.first.weight.data)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (wrapped, r"'first' \(DataParallel\) replicates a model"),
        (averaging, r"'first' \(BatchNorm1d\): momentum=None"),
        (sparse, r"'table' \(Embedding\): sparse=True"),
        (viewed, "'other' and 'first.weight' are two tensors on one memory"),
    ],
)
def test_modules_that_cannot_be_held_are_named(setup: Callable[[Any], None], message: str) -> None:
    with pytest.raises(UntraceableModel, match=message):
        raise refused(built(setup))


def moving(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.second.weight.lerp_(m.first.weight, 0.1)
    return x


def test_a_moving_average_in_parameters_is_refused_with_where_to_keep_it() -> None:
    assert "keep a moving average of weights in buffers" in str(refused(running(moving)))


def test_control_flow_of_a_library_is_refused_with_what_avoids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "checked_layers.py").write_text("def checked(x):\n    return x if x.max() < 9 else x / 2\n")
    monkeypatch.syspath_prepend(folder)
    checked = importlib.import_module("checked_layers").checked
    error = refused(running(lambda m, x: checked(x)))
    assert "in a library, perhaps a setting avoids the line" in str(error)
    own = refused(running(lambda m, x: x if x.max() < 9 else x / 2))
    assert "in a library" not in str(own)


class Odd:
    pass


@dataclasses.dataclass
class Result:
    value: Tensor


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: Odd(), r"forward returns a test_refusals\.Odd \(output\)"),
        (lambda x: {"a": [x, Odd()]}, r"Odd \(output\['a'\]\[1\]\).*Return tensors"),
        (lambda x: Result(x), r"Return a dict instead.*register_dataclass\(Result\)"),
    ],
)
def test_an_output_that_cannot_be_taken_apart_is_named(output: Callable[[Tensor], Any], message: str) -> None:
    class Returning(Base):
        def forward(self, x: Tensor) -> Any:
            y = self.first(x)
            return output(y)

    error = refused(Returning)
    with pytest.raises(UntraceableModel, match=message):
        raise error
    assert error.call is not None
    assert "return output(y)" in error.call


class Recurrent(Base):
    def setup(self) -> None:
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(0))[0].squeeze(0)


def with_auxiliary(m: Any, x: Tensor) -> Tensor:
    m.second.auxiliary = x.square().mean()
    m.calls += 1  # not used
    return x + m.second.auxiliary


def branching(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y * 3.0, (x,))


def distributed(m: Any, x: Tensor) -> Tensor:
    found = torch.distributions.Normal(x, nn.functional.softplus(m.second(x)))
    return found.log_prob(x + 1) + torch.distributions.kl_divergence(found, torch.distributions.Normal(0, 1))


def returning_much(m: Any, x: Tensor) -> Tensor:
    m.second.register_forward_hook(lambda module, arguments, output: (output, {"none": None, "x": x, "n": 3}))
    return x


@pytest.mark.parametrize(
    "model",
    [
        Recurrent,
        built(lambda m: m.first.register_forward_hook(lambda module, arguments, output: output * 3)),
        built(lambda m: m.first.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 3,))),
        pytest.param(
            built(lambda m: m.first.compile()),
            marks=pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch's own
        ),
        running(with_auxiliary),
        pytest.param(
            running(branching),
            marks=pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # torch's own
        ),
        running(distributed),
        running(lambda m, x: checkpoint(m.second, x, use_reentrant=False)),
        running(lambda m, x: checkpoint(m.second, x, use_reentrant=True)),
        running(lambda m, x: x * m.second.weight.data.norm()),
        running(lambda m, x: x + m.plain + torch.tensor([0.5, 1.0, 1.5, 2.0])),
    ],
    ids=[
        "lstm",
        "forward hook",
        "forward pre-hook",
        "compiled",
        "auxiliary",
        "cond",
        "distributions",
        "checkpoint",
        "reentrant checkpoint",
        "data",
        "constants",
    ],
)
def test_what_a_graph_can_hold_is_as_in_eager(model: Callable[[], nn.Module]) -> None:
    agree(training_of(model))


def test_what_was_patched_works_again() -> None:
    refused(running(forked))
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * 3)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    with torch.random.fork_rng():
        torch.manual_seed(3)
    assert torch.nn.Module.__setattr__ is nn.Module.__setattr__
    assert "backward" in vars(torch.autograd)
