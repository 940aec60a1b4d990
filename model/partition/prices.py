"""Measures the price of every operation of a graph on the device that will run it (Varuna §5.1).

Each distinct operation (target, shapes, types and arguments) runs by itself on random inputs, the heaviest by
counted work first, until a time limit. The others (too big for the memory given, out of time, or not able to
run by themselves) are priced by counted work at the measured rate. Prices only move cuts; one worker
measures, and the job keeps the cuts that it chose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ..precision import Precision
from ..seeds import preserved_randomness
from ..torch_private.operators import OpOverload
from ..torch_private.pytree import tree_map
from ..tracing.nodes import traffic_bytes, value_of
from ..tracing.regions import autocast_of
from .flops import signature, work_per_node

MIN_WORK = 1e9
"""Counted operations of a micro-batch below which a model is not measured: if all of it takes some 20 ms, the
times of single operations are mostly overhead and noise."""
_SMALL_SHARE = 1e-3  # of the counted work: lighter operations are not measured
_REPEATS = 2

Clock = Callable[[], float]


def measured_prices(
    nodes: Sequence[fx.Node],
    device: torch.device,
    *,
    precision: Precision = "fp32",
    seconds: float = 5.0,
    memory_bytes: int = 2 << 30,
    clock: Clock = time.perf_counter,
) -> list[float] | None:
    """Forward seconds of each of `nodes`; None if the model is too small to be worth measuring.

    `seconds` bounds the time, except that the last run is finished; `memory_bytes` bounds the inputs and
    results of one operation.
    """
    counted = work_per_node(nodes, precision)
    total = sum(counted)
    if total < MIN_WORK:
        return None
    keys = [signature(node) for node in nodes]
    weights: dict[Any, float] = {}
    examples: dict[Any, tuple[fx.Node, float]] = {}
    for key, node, work in zip(keys, nodes, counted, strict=True):
        weights[key] = weights.get(key, 0.0) + work
        examples[key] = (node, work)
    prices: dict[Any, float] = {}
    until = clock() + seconds
    for key, weight in sorted(weights.items(), key=lambda entry: -entry[1]):
        node, _ = examples[key]
        if weight < _SMALL_SHARE * total or clock() >= until:
            break
        if isinstance(node.target, OpOverload) and traffic_bytes(node) <= memory_bytes:
            price = _run(node, device, precision, clock)
            if price is not None:
                prices[key] = price
    measured = sum(examples[key][1] for key in prices)
    if measured <= 0:
        return None
    rate = sum(prices.values()) / measured  # seconds per counted operation
    return [prices.get(key, rate * work) for key, work in zip(keys, counted, strict=True)]


def _run(node: fx.Node, device: torch.device, precision: Precision, clock: Clock) -> float | None:
    """The least seconds of a few runs; None if the operation does not run by itself."""
    target: Any = node.target
    with preserved_randomness(), torch.no_grad(), autocast_of(node, precision, device.type):
        try:
            times = [_timed(target, _arguments(node, device), device, clock) for _ in range(1 + _REPEATS)]
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return None  # it refuses random inputs, or the device's memory is too small: counted instead
    return min(times[1:])


def _timed(
    target: Callable[..., object], arguments: tuple[Any, Any], device: torch.device, clock: Clock
) -> float:
    args, kwargs = arguments
    _synchronise(device)
    began = clock()
    target(*args, **kwargs)
    _synchronise(device)
    return clock() - began


def _arguments(node: fx.Node, device: torch.device) -> tuple[Any, Any]:
    filled = fx.map_arg((node.args, node.kwargs), lambda used: tree_map(_random, value_of(used)))
    return cast(tuple[Any, Any], map_aggregate(filled, lambda leaf: _moved(leaf, device)))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    return device if isinstance(leaf, torch.device) else leaf


def _random(value: Any) -> Any:
    """A tensor of this shape and type: random numbers, or an index or mask that is always in range."""
    if not isinstance(value, Tensor):
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    if value.dtype.is_floating_point:
        flat = torch.randn(extent).to(value.dtype)
    else:
        flat = torch.full((extent,), value.dtype == torch.bool, dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
