"""A traced graph as canonical text, without names that torch chose, for hashing and comparing traces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn


def graph_lines(graph: fx.Graph, owner: nn.Module, known: Mapping[str, str]) -> list[str]:
    """One line for each node; `known`: {placeholder: the name of its input}."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node, number in numbers.items():
        if node.op == "get_attr":
            held: Any = attrgetter(str(node.target))(owner)
            if isinstance(held, Tensor):
                lines.append(f"%{number} tensor {form(held)} {digest(held)}")
                continue
            lines.append(f"%{number} body")
            if isinstance(held, fx.GraphModule):
                lines += ["  " + line for line in graph_lines(held.graph, held, {})]
            continue
        target = known.get(node.name, "") if node.op == "placeholder" else str(node.target)
        arguments = fx.map_arg((node.args, node.kwargs), lambda used: f"%{numbers[used]}")
        value: Any = node.meta.get("val")
        shown = form(value) if isinstance(value, Tensor) else ""
        region = node.meta.get("autocast", "")
        lines.append(f"%{number} {node.op} {target} {arguments} {shown} {region}")
    return lines


def form(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}"


def digest(tensor: Tensor) -> str:
    """SHA-256 of a real tensor's values."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()
