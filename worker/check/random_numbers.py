"""Random operations that give the same numbers to two runs, whichever order and pieces they run in.

Dropout of the user's module and of the sections draws from generators in other states, and there is no one
order of calls that both keep. So each random operation draws from a seed that its kind and shape alone
decide: both runs drop the same elements, in every micro-batch. Gradients of batch and group norms are right
in both, where torch would misread memory (see `settle_batch_norms` and `settle_group_norms`).

Sees operations in torch's dispatcher: checked with torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...model.seeds import preserved_randomness, seed64, seed_everything
from ...model.torch_private.higher_order import FunctionsSeen
from ...model.torch_private.operators import arguments_of, is_random, written_arguments
from ...model.torch_private.pytree import tree_map
from ...model.tracing.norms import with_plain_strides

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward
_GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward
_MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}
_HAVE_MEANS = frozenset(
    (*_MEANS, "native_dropout", "bernoulli", "normal", "uniform", "exponential", "randint", "randint_like")
)


class FixedNumbers(FunctionsSeen):
    """While entered, random operations draw what (operation, shape) decide. `expected`: what can be is drawn
    as its mean (dropout keeps all), so that the size of a batch changes nothing."""

    def __init__(self, *, expected: bool = False) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()  # operation -> how often it was called
        self.drawn: set[str] = set()  # with `expected`: operations whose mean is not known, which drew
        self._expected = expected

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = getattr(func, "overloadpacket", None)
        if kind is _BATCH_NORM_BACKWARD:
            args = (with_plain_strides(args[0]), with_plain_strides(args[1]), *args[2:])
        elif kind is _GROUP_NORM_BACKWARD and not args[-1][0]:  # the mask: the input's gradient is not wanted
            return None, *func(*args[:-1], [True, *args[-1][1:]], **kwargs)[1:]
        if not is_random(func, args, kwargs):
            return self.run(func, args, kwargs)
        given = arguments_of(func, args, kwargs)
        name = func.overloadpacket.__name__.removesuffix("_")
        self.counts[name] += 1
        if given.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        plain = tree_map(_plain, args)
        with preserved_randomness():
            seed_everything(seed64("dry run", name, str([_shape(a) for a in args])))
            result = func(*plain, **kwargs)
        if self._expected:
            if name not in _HAVE_MEANS:
                self.drawn.add(name)
            result = _mean(name, args, given, result)
        for position, _ in written_arguments(func):
            if position < len(args):
                args[position].copy_(plain[position])
                result = args[position] if result is plain[position] else result
        return result


def _plain(leaf: Any) -> Any:
    """A contiguous copy: numbers are drawn in the order of the shape, not of the memory."""
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def _shape(argument: Any) -> object:
    return tuple(argument.shape) if isinstance(argument, Tensor) else argument


def _mean(name: str, args: tuple[Any, ...], given: Mapping[str, Any], drawn: Any) -> Any:
    if name in _MEANS:
        return drawn.fill_(_MEANS[name])
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(drawn[1])
    if name == "bernoulli":
        chance = given["p"] if "p" in given else args[0]
        return drawn.copy_(chance) if isinstance(chance, Tensor) else drawn.fill_(chance)
    if name == "normal" and "mean" in given and not isinstance(given["mean"], Tensor):
        return drawn.fill_(given["mean"])
    if name == "uniform":
        return drawn.fill_((given["from"] + given["to"]) / 2)
    if name == "exponential":
        return drawn.fill_(1 / given["lambd"])
    if name in ("randint", "randint_like"):
        return drawn.fill_((given.get("low", 0) + given["high"]) // 2)
    return drawn
