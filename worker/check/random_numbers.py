"""Random operations that give the same numbers to two runs, whichever order and pieces they run in.

Dropout of the user's module and of the sections draws from generators in other states, and there is no one
order of calls that both keep. So each random operation draws from a seed that its kind and shape alone
decide: both runs drop the same elements, in every micro-batch.

Reads operators' tags and schemas of torch's dispatcher: checked with torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...model.seeds import preserved_randomness, seed64, seed_everything

_MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}


class FixedNumbers(TorchDispatchMode):
    """While entered, random operations draw what (operation, shape) decide. `expected`: what can be is drawn
    as its mean (dropout keeps all), so that the size of a batch changes nothing. `drawn_in_fp32`: numbers of
    float64 are those of fp32, so that a computation in float64 has the same."""

    def __init__(self, *, expected: bool = False, drawn_in_fp32: bool = False) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()  # operation -> how often it was called
        self._expected = expected
        self._drawn_in_fp32 = drawn_in_fp32

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__.removesuffix("_")
        self.counts[name] += 1
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        arguments = tree_map(_plain, args)
        with preserved_randomness():
            seed_everything(seed64("dry run", name, str([_shape(a) for a in args])))
            if self._drawn_in_fp32:
                with default_dtype(torch.float32):
                    drawn = func(*tree_map(_narrowed, arguments), **tree_map(_narrowed, kwargs))
                result = tree_map(partial(_widened, torch.get_default_dtype()), drawn)
            else:
                result = func(*arguments, **kwargs)
        if self._expected:
            result = _mean(name, args, kwargs, result)
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            return args[0].copy_(result)
        return result


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """What numbers of floating point are whose type nobody names."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _plain(leaf: Any) -> Any:
    """A contiguous copy: numbers are drawn in the order of the shape, not of the memory."""
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def _narrowed(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.float() if leaf.dtype == torch.float64 else leaf
    return torch.float32 if leaf is torch.float64 else leaf


def _widened(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


def _shape(argument: Any) -> object:
    return tuple(argument.shape) if isinstance(argument, Tensor) else argument


def _mean(name: str, args: Sequence[Any], kwargs: dict[str, Any], drawn: Any) -> Any:
    if name in _MEANS:
        return drawn.fill_(_MEANS[name])
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(drawn[1])
    if name == "bernoulli":
        chance = args[1] if len(args) > 1 else kwargs.get("p", args[0])
        return drawn.copy_(chance) if isinstance(chance, Tensor) else drawn.fill_(chance)
    if name in ("normal", "uniform") and isinstance(args[0], Tensor):
        low, high = (args[1] if len(args) > 1 else 0.0), (args[2] if len(args) > 2 else 1.0)
        return drawn.fill_(low if name == "normal" else (low + high) / 2)
    if name in ("randint", "randint_like"):
        limits = [argument for argument in args if isinstance(argument, int)]
        return drawn.fill_((limits[-1] + (limits[0] if len(limits) > 1 else 0)) // 2)
    return drawn
