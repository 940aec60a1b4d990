"""Calls autograd's engine as `torch.autograd.grad` does, without its checks.

`grad` first checks every tensor in Python. Right after a long operation, when caches are cold, that takes
nearly a tenth of a millisecond for each section of each backward. The checked conditions hold here by
construction. `Variable._execution_engine` is not documented API; it is used here only, checked with torch
2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore


def gradients(
    roots: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    wanted: Sequence[Tensor | GradientEdge],
    *,
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `wanted`, given `seeds`, the gradients of `roots`; None where no gradient flows.

    There must be at least one of each; all roots need gradients, and a seed has its root's shape and type.
    Frees the graph, unless told to keep it.
    """
    create_graph = False
    allow_unreachable = True
    return _engine.run_backward(
        tuple(roots),
        tuple(seeds),
        keep_graph,
        create_graph,
        tuple(wanted),
        allow_unreachable,
        accumulate_grad=False,
    )
