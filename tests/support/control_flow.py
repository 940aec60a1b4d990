"""Layers with the control flow of torch, whose functions have parameters."""

from __future__ import annotations

import torch
from coupled_models import Layer
from torch import Tensor
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan


class Branches(Layer):
    """torch.cond, which takes its second branch; that one holds a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.cond(x.square().mean() < 0, torch.tanh, self.transformed, (x,))

    def transformed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * torch.tensor([0.5])


class Scans(Layer):
    """scan over time: a recurrent layer."""

    def forward(self, x: Tensor) -> Tensor:
        def turn(carried: dict[str, Tensor], row: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
            state = torch.tanh(self.linear(carried["state"]) + row)
            return {"state": state}, (state.clone(), state * 2)

        rows = super().forward(x).transpose(0, 1)
        _, (states, doubled) = scan(turn, {"state": torch.zeros_like(rows[0])}, rows)
        return x + (states + doubled).transpose(0, 1)


class Maps(Layer):
    """map over time."""

    def forward(self, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return torch.tanh(self.linear(row))

        return x + torch_map(one, super().forward(x).transpose(0, 1)).transpose(0, 1)
