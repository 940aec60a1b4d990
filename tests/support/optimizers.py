"""Optimizers as users write them, for sections that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Named = Sequence[tuple[str, nn.Parameter]]


class Lamb(torch.optim.Optimizer):
    """LAMB with a trust ratio of each parameter (You et al., 2020), counting its steps as a number."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"count": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
        assert parameter.grad is not None
        (beta1, beta2), state["count"] = group["betas"], state["count"] + 1
        state["m"].lerp_(parameter.grad, 1 - beta1)
        state["v"].lerp_(parameter.grad.square(), 1 - beta2)
        mean = state["m"] / (1 - beta1 ** state["count"])
        update = mean / (state["v"].div(1 - beta2 ** state["count"]).sqrt() + 1e-6)
        update += group["weight_decay"] * parameter
        weight, size = parameter.norm(), update.norm()
        ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
        parameter.sub_(group["lr"] * ratio * update)


class Warming(torch.optim.SGD):
    """Keeps a number in its groups and one in itself, and changes its own learning rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["lr"] *= 1.0 + 1.0 / (self.calls + group["seen"])
        super().step()


def by_dimension(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[Named], Any]:
    """Matrices with weight decay, vectors without and at another rate: some sections have no matrix."""

    def build(named: Named) -> torch.optim.Optimizer:
        matrices = [(name, p) for name, p in named if p.dim() > 1]
        vectors = [(name, p) for name, p in named if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]
        return make(groups, **settings)

    return build


def by_name(named: Named) -> torch.optim.Optimizer:
    """Groups of bare parameters; the first of them is empty in most sections."""
    first = [p for name, p in named if "embed" in name]
    rest = [p for name, p in named if "embed" not in name]
    return torch.optim.AdamW([{"params": first, "lr": 1e-3}, {"params": rest}], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "adamw": lambda named: torch.optim.AdamW(named, lr=torch.tensor(1e-2)),
    "foreach": lambda named: torch.optim.AdamW(named, lr=1e-2, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, lr=1e-2, fused=True),
    "fused-sgd": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda named: torch.optim.Adafactor(named, lr=1e-2),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "lamb": lambda named: Lamb(named),
    "warming": lambda named: Warming(named, lr=1e-3),
    "groups": by_dimension(torch.optim.AdamW, lr=1e-2),
    "groups-sgd": by_dimension(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "groups-lamb": by_dimension(Lamb),
    "groups-by-name": by_name,
}
