"""Jobs whose parts are tied together outside the graph, one way each, on one small model."""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import Tensor, nn

WIDTH = 16
Batch = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(self.norm(x))), 0.1, self.training)


class Net(nn.Module):
    """Four layers, so that there are sections to tie."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Data:
    """Rows of eight tokens; -100 hides as many targets as the index says."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Batch:
        tokens = (torch.arange(8) * (index % 5 + 1) + index) % WIDTH
        hidden = torch.arange(8) < index % 7
        return {"tokens": tokens, "targets": tokens.roll(1), "masked": tokens.roll(1).where(~hidden, -100)}


def loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def sound(**changes: Any) -> Training:
    """Nothing is hidden."""
    good = Training(
        model=Net,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Data,
        clip_grad_norm=1.0,
    )
    return replace(good, **changes)


# ---- models ------------------------------------------------------------------------------------------------


class Codebook(Net):
    """Moves a table to what the samples are, after its use; the second output has no dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Any:
        x = super().forward(tokens)
        near = (x - self.get_buffer("table")).square().mean()
        with torch.no_grad():
            self.get_buffer("table").lerp_(x.mean((0, 1)), 0.5)
        return x, near


class Distributed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(super().forward(x), 1.0).log_prob(x)


class Recurring(Layer):
    """Adds what it made of the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        made = x if self.before is None else x + 0.1 * self.before
        self.before = x.detach()
        return made


SHARED: dict[str, Tensor] = {}


class Through(Layer):
    """Hands a value from one call to the next through a dict of its file."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + SHARED.get("last", torch.zeros(()))
        SHARED["last"] = x.detach().mean() * 0.1
        return x


class Calls(Layer):
    """Scales by the number of its calls, a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


KNOB = {"scale": 1.0}


class Turned(Net):
    """Scaled by a global that the loss turns down."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * KNOB["scale"]


class Lucky(Net):
    """Draws from Python's generator, which a trace does once for ever."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1.0 + random.random())


class Tying(Net):
    """Ties its output to its embedding when it is called first."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.out.weight = self.embed.weight
        return super().forward(tokens)


class History(Layer):
    """Keeps a buffer of means in place, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) - self.seen
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class Custom(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(super().forward(x))


class Hurried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + time.perf_counter() % 1)


class Restless(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Hurried.apply(super().forward(x))


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(WIDTH, WIDTH))


class Clock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + time.perf_counter() % 1)


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


class Cached(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + table(WIDTH) * self.linear(x)


class Sparse(Layer):
    def forward(self, x: Tensor) -> Tensor:
        columns = x.flatten(0, 1).t()
        return x + torch.sparse.mm(torch.eye(WIDTH).to_sparse(), columns).t().view_as(x)


class Powers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        squares = torch.arange(WIDTH)
        squares.pow_(2)
        return x + 0.01 * squares * self.linear(x)


class Mates(Layer):
    """Attends to the other samples of the micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.norm(x).transpose(0, 1)
        return x + F.scaled_dot_product_attention(turned, turned, turned).transpose(0, 1)


class TimeFirst(Net):
    """Returns the dimension of time before that of samples."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(0, 1)


class Centred(Layer):
    """Takes the mean over samples away: no batch norm, since there are no running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x - 0.5 * x.mean(0, keepdim=True))))


class Hooked(Layer):
    """Halves the gradients that flow through it, by a hook of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda _module, inputs, _outputs: tuple(g / 2 for g in inputs))


class TensorHooked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


# ---- losses ------------------------------------------------------------------------------------------------


def masked_mean(output: Tensor, batch: Batch) -> Tensor:
    """A mean over the targets that are not masked: unequal numbers of them."""
    return F.cross_entropy(output.flatten(0, 1), batch["masked"].flatten())


def masked_sum(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    wanted = batch["masked"].flatten()
    return F.cross_entropy(output.flatten(0, 1), wanted, reduction="sum"), (wanted != -100).sum()


def masked_alike(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Micro-batches count alike, and the user says so."""
    return masked_mean(output, batch), torch.ones(())


def total(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def mean_and_count(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return masked_mean(output, batch), (batch["masked"] != -100).sum()


def coupled(output: Tensor, batch: Batch) -> Tensor:
    """Samples are contrasted with each other: no weights make two micro-batches one."""
    means = output.mean(1)
    return loss(output, batch) + (means @ means.T).exp().mean() * 0.1


def coupled_time_first(output: Tensor, batch: Batch) -> Tensor:
    means = output.mean(0)
    own = F.cross_entropy(output.permute(1, 2, 0), batch["targets"])
    return own + (means @ means.T).exp().mean() * 0.1


def two_means(output: Tensor, batch: Batch) -> Tensor:
    """Means over different counts: of targets that are not masked, and of samples."""
    return masked_mean(output, batch) + output.square().mean()


def pairs(output: Tensor, batch: Batch) -> Tensor:
    """Contrastive: with one sample there is nothing to tell it from."""
    ends = F.normalize(output[:, 0], dim=-1), F.normalize(output[:, 1], dim=-1)
    return F.cross_entropy(ends[0] @ ends[1].T / 0.1, torch.arange(len(output)))


def three(output: Tensor, batch: Batch) -> Any:
    return loss(output, batch), torch.tensor(1.0), output.detach()


def and_confidence(output: Tensor, batch: Batch) -> Any:
    return loss(output, batch), output.softmax(-1).amax(-1).mean()


def and_accuracy(output: Tensor, batch: Batch) -> Any:
    return loss(output, batch), 0.1 + (output.argmax(-1) == batch["targets"]).float().mean()


def and_metrics(output: Tensor, batch: Batch) -> Any:
    return loss(output, batch), {"accuracy": (output.argmax(-1) == batch["targets"]).float().mean()}


def of_hard_samples(output: Tensor, batch: Batch) -> Any:
    """Of those targets alone whose loss is large, as online hard example mining takes them."""
    each = F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    hard = each.detach() > 2.7
    return (each * hard).sum(), hard.sum()


def of_even_rows(output: Tensor, batch: Batch) -> Any:
    """Other rows count nothing."""
    each = F.cross_entropy(output.transpose(1, 2), batch["targets"], reduction="none")
    counts = (batch["tokens"][:, :1] % 2 == 0).expand_as(each)
    return (each * counts).sum(), counts.sum()


def noisy(output: Tensor, batch: Batch) -> Tensor:
    wanted = F.one_hot(batch["targets"], WIDTH) + 0.1 * torch.randn_like(output)
    return F.mse_loss(output, wanted)


def near(output: Any, batch: Batch) -> Tensor:
    return loss(output[0], batch) + output[1]


class Annealed:
    """Falls with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return loss(output, batch) / self.calls


def turning(output: Tensor, batch: Batch) -> Tensor:
    KNOB["scale"] *= 0.5
    return loss(output, batch)


def scaled(output: Tensor, batch: Batch) -> Tensor:
    return torch.amp.GradScaler("cpu", init_scale=4.0).scale(loss(output, batch))


# ---- data --------------------------------------------------------------------------------------------------


class Detections(Data):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "boxes": [{"box": torch.zeros(2, 4)}]}


class Drawn(Data):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Batch:
        noise = torch.randint(0, WIDTH, (8,), generator=self.generator)
        return {**super().__getitem__(index), "tokens": noise}
