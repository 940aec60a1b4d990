"""Tracing: one graph, the same everywhere; what it cannot hold is refused by name, with the user's line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agree
from agreement import training_of as agreement_training
from makara.model.data import Batches
from makara.model.errors import UntraceableModel, UserCodeError
from makara.model.partition.partition import choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.source import stack_place
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections.runtime import SectionRuntime
from models import Tokens, masked_loss, skip_model, tied_gpt, untied_mlp
from reference import run_reference
from torch import Tensor, fx, nn


def training_of(model: Callable[[], nn.Module], loss: Any = masked_loss) -> Training:
    return Training(
        model=model, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), dataset=Tokens
    )


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens.float())


class Counting(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += tokens.float().mean()
        return self.layer(tokens.float())


class Branching(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.sum() > 3:
            return self.layer(tokens.float())
        return tokens.float()


class Item(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens.float()) * tokens.float().mean().item()


class Selecting(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens.float())[tokens[:, 0] > 2]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class CustomBackward(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return Doubled.apply(self.layer(tokens.float()))


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class InPlaceFunction(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return Shifted.apply(self.layer(tokens.float()))


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class FunctionOfModule(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return Through.apply(tokens.float(), self.layer)


class ChangingInput(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        tokens[:, 0] = 1
        return self.layer(tokens.float())


class Caching(Base):
    def forward(self, tokens: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cache(self.layer(tokens.float()))


class Cache:
    def __init__(self, kept: Tensor) -> None:
        self.kept = kept


class WrongShape(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(tokens.float()) @ torch.zeros(5, 5)


@pytest.mark.parametrize(
    ("model", "message", "line"),
    [
        (Counting, "'calls' in place", "self.calls += tokens.float().mean()"),
        (Branching, "control flow on a tensor's values", "if tokens.sum() > 3:"),
        (Item, r"aten\.item", ".mean().item()"),
        (Selecting, "shape from the values", "[tokens[:, 0] > 2]"),
        (
            InPlaceFunction,
            r"Shifted, a torch.autograd.Function.*changes an argument in place",
            "Shifted.apply",
        ),
        (
            FunctionOfModule,
            r"Through, a torch.autograd.Function.*an argument of it is a Linear",
            "Through.apply",
        ),
        (ChangingInput, "changes its input 'tokens' in place", "tokens[:, 0] = 1"),
        (WrongShape, "cannot be traced", "@ torch.zeros(5, 5)"),
    ],
)
def test_an_untraceable_model_is_refused_with_the_call(
    model: Callable[[], nn.Module], message: str, line: str
) -> None:
    with pytest.raises(UntraceableModel, match=message) as caught:
        trace(training_of(model), 4)
    assert caught.value.call is not None
    assert line in caught.value.call


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(UntraceableModel, match="Return tensors"):
        trace(training_of(Caching), 4)


@torch.library.custom_op("makara_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return 3 * x


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, gradient: 5 * gradient)  # unlike the forward's derivative


class CustomOperator(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return tripled(self.layer(tokens.float()))


def test_a_custom_operator_keeps_its_registered_backward() -> None:
    training = training_of(CustomOperator, lambda output, batch: output.square().mean())
    chain = split(trace(training, 4), [])
    section = SectionRuntime(chain, 0, training, 0)
    batch = Batches(training.dataset(), 0, 4, 4).micro_batch(0, 0)
    output = section.forward(0, 0, {}, batch)
    assert output.saved.loss is not None
    weight = section.parameters["layer.weight"]
    x = tripled(batch["tokens"].float() @ weight.T + section.parameters["layer.bias"])
    expected = torch.autograd.grad(training.loss(x, batch), weight)[0]
    assert torch.equal(section.backward(output.saved, {})[1]["layer.weight"], expected)


class Reversed(torch.autograd.Function):
    """Gives its argument itself, and turns the gradient around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Split(torch.autograd.Function):
    """Two results, one without a gradient; forward apart from its context; a backward of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sign(x) * weight, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight * (x.abs() < 1), (gradient * torch.sign(x)).sum(0)


class Functions(Base):
    """Calls them on a hidden state and on a weight, with other constants, and inside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 12))
        self.head = nn.Linear(12, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(tokens.float() / 10)
        signs, positive = Split.apply(x, self.scale)
        x = torch.where(positive, x + signs, Reversed.apply(x, 0.5)).relu_()
        with torch.autocast("cpu", torch.bfloat16):
            y = Reversed.apply(self.head(x), 2.0).float()
        return Doubled.apply(y) + nn.functional.linear(x, Doubled.apply(self.head.weight))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_sections", [1, 3])
def test_custom_functions_keep_their_backward(num_sections: int, precision: Precision) -> None:
    training = training_of(Functions, lambda output, batch: output.square().mean())
    cuts = choose_cuts(trace(training, 4, 1, precision), num_sections)
    assert len(cuts) == num_sections - 1
    agree(training, cuts, 1e-5 if precision == "fp32" else 1e-2, precision)


class Clamped(torch.autograd.Function):
    """Straight through; its constant may be left out or given by name."""

    @staticmethod
    def forward(x: Tensor, limit: float = 0.5) -> Tensor:
        return x.clamp(-limit, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return 2 * gradient, None


doubled, clamped = Doubled.apply, Clamped.apply


class Aliases(Base):
    def __init__(self) -> None:
        super().__init__()
        self.reverse = Reversed.apply

    def forward(self, tokens: Tensor) -> Tensor:
        x = clamped(clamped(self.layer(tokens.float() / 10)), limit=0.3)
        return self.reverse(doubled(x), 0.5)


def test_a_custom_function_under_another_name_keeps_its_backward() -> None:
    agree(training_of(Aliases, lambda output, batch: output.square().mean()), [])


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (factor + 1)

    return Scaled.apply


class Closures(Base):
    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = scaled(1), scaled(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.coarse(self.layer(tokens.float() / 10))
        return self.coarse(x) + self.fine(x) * scaled(3)(scaled(0.5)(x))


def test_custom_functions_of_one_name_stay_apart() -> None:
    training = training_of(Closures, lambda output, batch: output.square().mean())
    assert trace(training, 4).graph_hash == trace(training, 4).graph_hash
    agree(training, [])


def test_custom_functions_work_again_after_a_trace() -> None:
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_forward_arguments_must_be_entries_of_the_samples() -> None:
    class Other(Base):
        def forward(self, words: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return words

    with pytest.raises(UserCodeError, match=r"needs \['words'\]"):
        trace(training_of(Other), 2)


def test_a_model_function_that_raises_is_a_user_error() -> None:
    def build() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(UserCodeError, match=r"Training\.model: ValueError: no such size"):
        trace(training_of(build), 2)


def test_a_lazy_module_is_a_user_error() -> None:
    with pytest.raises(
        UserCodeError, match="a lazy module has no shapes before its first call; give the sizes"
    ):
        trace(training_of(lambda: nn.LazyLinear(4)), 2)


def test_the_hash_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"
        "from models import tied_gpt\n"
        "from makara.model.tracing.trace import trace\n"
        "print(trace(tied_gpt(), 2, 5).graph_hash)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert found.stdout.strip() == trace(tied_gpt(), 2, 5).graph_hash


def test_the_hash_tells_models_and_sizes_apart() -> None:
    hashes = [
        trace(tied_gpt(), 2).graph_hash,
        trace(tied_gpt(), 4).graph_hash,
        trace(tied_gpt(dropout=0.2), 2).graph_hash,
        trace(tied_gpt(layers=3), 2).graph_hash,
        trace(untied_mlp(), 2).graph_hash,
        trace(skip_model(), 2).graph_hash,
    ]
    assert len(set(hashes)) == len(hashes)


def test_tied_weights_have_one_name() -> None:
    traced = trace(tied_gpt(), 2)
    assert traced.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in traced.parameter_names
    assert traced.persistent_buffers == {"positions"}


def test_unused_and_frozen_parameters_are_not_trained() -> None:
    traced = trace(untied_mlp(), 2)
    assert {"scale", "unused"} <= set(traced.parameter_names)
    assert not {"scale", "unused"} & traced.trainable


class InPlace(Base):
    """Writes in place, through views and along the whole chain; uses constants and a no_grad region."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.offsets = torch.arange(12.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(tokens.float() / 40)
        flipped = x.view(-1, 3, 4).transpose(1, 2)
        x += 1
        x = flipped.reshape(x.shape)
        filled = torch.zeros_like(x)
        filled[:, 0] = x[:, 0]
        for layer in self.others:
            x += layer(torch.tanh(x))
        with torch.no_grad():
            shift = x.mean() * torch.tensor([0.5])
        return (x + filled + self.offsets / 12 + shift).relu_()


class Filled(nn.Module):
    """Writes a value that needs a gradient into new memory, whole, or over one that is no longer needed."""

    def __init__(self, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self._fill = fill

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self._fill(h)) + h


def filled_whole(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[...] = h
    return out


def filled_by_a_row(h: Tensor) -> Tensor:
    out = torch.zeros_like(h, dtype=torch.float64)
    out[:] = h[0]
    return out.float()


@pytest.mark.parametrize(
    "fill",
    [
        filled_whole,
        filled_by_a_row,
        lambda h: torch.empty_like(h).copy_(h),
        lambda h: h.sin().zero_(),
        lambda h: h.sin().uniform_(0.5, 0.5).fill_(2),
    ],
)
def test_what_is_written_over_has_the_gradients_of_eager(fill: Callable[[Tensor], Tensor]) -> None:
    training = agreement_training(lambda: Filled(fill))
    agree(training)
    agree(training, choose_cuts(trace(training, 4, 1), 2))


class Tables(nn.Module):
    """Tensors that are no buffers, converted to what they are already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.linspace(0.5, 1.0, 4)
        self.held = {"order": torch.tensor([2, 0, 3, 1])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale.to(x.device)
        h = h[:, self.held["order"].to(x.device).long()]
        return self.last(h * self.scale.to(x).float()) + self.scale


def test_conversions_of_constants_that_change_nothing_are_traced() -> None:
    """Found: an assertion of torch's failed, on two modes of fake tensors."""
    training = agreement_training(Tables)
    agree(training)
    agree(training, choose_cuts(trace(training, 4, 1), 2))


@pytest.mark.parametrize("num_sections", [1, 2, 3])
def test_in_place_code_gives_what_eager_gives(num_sections: int) -> None:
    training = training_of(InPlace, lambda output, batch: output.square().mean())
    traced = trace(training, 3, 2)
    cuts = choose_cuts(traced, num_sections)
    losses, state = run_reference(
        training, microbatch_size=3, num_micro_batches=1, cuts=cuts, steps=3, seed=2, numerics="fast"
    )
    assert split(traced, cuts).num_sections == num_sections
    model = InPlace()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(traced.initial(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = Batches(Tokens(), 2, 3, 3)
    for step, loss in enumerate(losses):
        eager = model(batches.micro_batch(step, 0)["tokens"]).square().mean()
        optimizer.zero_grad()
        eager.backward()
        optimizer.step()
        assert loss == pytest.approx(float(eager.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[f"weights/{name}"], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "user", ["/home/me/torch/train.py", str(Path(torch.__file__).parents[1] / "torchvision" / "resnet.py")]
)
def test_the_users_line_is_found_where_a_folder_is_called_like_torch(user: str) -> None:
    """Found: code below any folder of that name, and beside torch's own, was taken for torch's."""
    node = fx.Graph().placeholder("x")
    frames = (user, torch.nn.__file__)
    node.meta["stack_trace"] = "".join(f'  File "{file}", line 3, in forward\n    x\n' for file in frames)
    assert stack_place(node) == (user, 3)
