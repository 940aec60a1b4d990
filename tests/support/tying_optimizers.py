"""Optimizers that look at more than one parameter at a time, one way each, and some that only seem to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020, Algorithm 2) with plain momentum; `over_all`: one trust ratio for all."""

    def __init__(self, named: Named, lr: float = 1e-2, over_all: bool = False) -> None:
        super().__init__(named, {"lr": lr})
        self.over_all = over_all

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in held:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad, alpha=0.1)
        together = torch.stack([self.state[p]["moment"].norm() for _, p in held]).norm()
        for group, p in held:
            moment = self.state[p]["moment"]
            p.sub_(
                moment, alpha=group["lr"] * float(p.norm() / (together if self.over_all else moment.norm()))
            )


class ClippingSGD(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        super().step()


class Counting(torch.optim.SGD):
    """Its learning rate falls with the number of steps of all optimizers: state shared through a global."""

    shared: ClassVar = {"steps": 0}

    def step(self, closure: None = None) -> None:
        Counting.shared["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / Counting.shared["steps"]
        super().step()


class Remembering(torch.optim.SGD):
    """Counts its own steps in an attribute."""

    def __init__(self, named: Named, lr: float) -> None:
        super().__init__(named, lr=lr)
        self.num_steps = 0

    def step(self, closure: None = None) -> None:
        self.num_steps += 1
        super().step()


class Skipping(torch.optim.SGD):
    """Skips a step when any gradient has overflowed, as a loss scaler does."""

    def step(self, closure: None = None) -> None:
        if all(p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            super().step()


class Scaled(torch.optim.SGD):
    """Unscales by a scaler of its own."""

    def __init__(self, named: Named, lr: float) -> None:
        super().__init__(named, lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(()))

    def step(self, closure: None = None) -> None:
        self.scaler.unscale_(self)
        super().step()
        self.scaler.update()


def clamping(named: Named) -> torch.optim.Optimizer:
    """Clamps gradients as they are accumulated, by hooks that it leaves on the parameters."""

    def clamp(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-1e-3, 1e-3)

    for _, parameter in named:
        parameter.register_post_accumulate_grad_hook(clamp)
    return torch.optim.SGD(named, lr=0.1)


def by_place(named: Named) -> torch.optim.Optimizer:
    """Lower layers learn more slowly, by their place in the list."""
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * (place + 1)} for place, (_, p) in enumerate(named)], lr=0.1
    )


def with_scheduler(named: Named) -> object:
    """As Lightning takes them."""
    optimizer = torch.optim.SGD(named, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
