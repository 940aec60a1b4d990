"""Models as strangers brought them to `makara check`, each with one thing that once gave a raw error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from makara.worker import Training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Rows:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        x, y = torch.randn(2, WIDTH, generator=numbers).to(self._dtype)
        return {"x": x, "y": y}


class Layers(nn.Module):
    """Two layers and what a case puts between them."""

    def __init__(self, between: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(WIDTH, WIDTH), between(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Checkpointed(Layers):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(lambda: nn.BatchNorm1d(WIDTH))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(lambda value: self.between(self.first(value)), x, use_reentrant=self._reentrant)
        )


class Turning(nn.Module):
    """A complex parameter, as it is and as two real numbers."""

    def __init__(self, complex_parameter: bool) -> None:
        super().__init__()
        turn = torch.randn(WIDTH, dtype=torch.cfloat)
        self.turn = nn.Parameter(turn if complex_parameter else torch.view_as_real(turn))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn if self.turn.is_complex() else torch.view_as_complex(self.turn)
        return (x * turn).real


class Misshapen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 5)


class Passing(nn.Module):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layers()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


class Wide(nn.Module):
    """Layers whose weights are nearly all of its memory."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.last = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


class Long(nn.Module):
    """Layers whose activations are nearly all of its memory."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(16 if index else 1, 16, 3, padding=1) for index in range(num_layers)
        )
        self.last = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 1000).unsqueeze(1)
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.last(x.mean(-1))


def training(model: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Training:
    return Training(
        model=model,
        loss=lambda output, batch: (output - batch["y"]).square().mean(),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=lambda: Rows(dtype),
    )


def batch_norm() -> nn.Module:
    return Layers(lambda: nn.BatchNorm1d(WIDTH))


def misshapen() -> Training:
    return training(lambda: Layers(Misshapen))


class Cancelling(nn.Module):
    """The gradient of `shift` is a thousandth of two terms that cancel, of the first and of the last section:
    rounding makes it uncertain in its fifth digit, in plain torch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift = 1e4 * (self.shift - self.shift.detach())
        hidden = self.first(x) + shift
        return hidden + 1e-3 * self.last(hidden) - shift


class InFloat32(nn.Module):
    """Refuses to run in anything else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"expected float32, got {x.dtype}")
        return self.inner(x)


class LowPrecision(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.first.weight.dtype)).float()


class Normed(nn.Module):
    """Divides each sample by its norm, none of zeros; and its loss takes nothing but probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            x = x / x.norm(dim=1, keepdim=True)
        return x.sum(1).sigmoid()


class Draw(nn.Module):
    """An operation that refuses what is no probability."""

    def forward(self, chances: Tensor) -> Tensor:
        return torch.bernoulli(chances.detach()) * chances


class Drawing(Layers):
    def __init__(self) -> None:
        super().__init__(Draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).sigmoid()))
