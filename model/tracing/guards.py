"""Refuses calls within a model's forward that a trace would drop or bake in.

Only calls from code outside torch count, because torch's own modules use these functions correctly.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from ..errors import UntraceableModel
from ..patching import replaced
from ..torch_private.functions import BELOW_FUNCTION, TORCHS_OPERATORS
from .functions import Operators, Unheld
from .source import called_by_user, calling_line, is_library, line_of

_GRADIENT_HOOK = (
    "a hook on a gradient is not part of the graph and would be lost. Scale or clip in the forward pass "
    "(x * s + (x * (1 - s)).detach() scales the gradient of x by s), or in the optimizer"
)
_GRADIENT_INSIDE = (
    "a gradient that is taken inside forward is not part of the graph. Write its formula with operations on "
    "tensors"
)
_FREEZE = "Freeze parameters when the model is built; use detach() or no_grad for values"
_GENERATOR = (
    "a generator that is seeded or restored inside forward would be ignored: Makara seeds the global one for "
    "each micro-batch and section. Draw from it as it is, or make the numbers a buffer or an entry of the "
    "samples"
)
Refusal = Callable[..., str | None]
"""Says why a call with these arguments is refused; None if it is not."""


def _switched_gradient(tensor: Tensor, requires_grad: bool = True) -> str | None:
    if tensor.requires_grad == requires_grad:
        return None
    remedy = "Nor is a gradient that is taken there: write its formula" if requires_grad else _FREEZE
    return f"requires_grad_({requires_grad}) inside forward is not part of the graph. {remedy}"


def _new_parameter(module: nn.Module, name: str, value: Any) -> str | None:
    if not isinstance(value, nn.Parameter):
        return None
    return (
        f"forward assigns a Parameter to {name!r} of a {type(module).__name__}, which no optimizer would "
        "know. Make and tie parameters in the constructor"
    )


def _inference_mode(_mode: torch.inference_mode) -> str:
    return (
        "torch.inference_mode(): torch.inference_mode inside a model that trains would be lost. Use "
        "torch.no_grad"
    )


_REFUSED: tuple[tuple[Any, str, str | Refusal], ...] = (
    (Tensor, "register_hook", _GRADIENT_HOOK),
    (Tensor, "register_post_accumulate_grad_hook", _GRADIENT_HOOK),
    (nn.Module, "register_full_backward_hook", _GRADIENT_HOOK),
    (nn.Module, "register_full_backward_pre_hook", _GRADIENT_HOOK),
    (Tensor, "backward", _GRADIENT_INSIDE),
    (torch.autograd, "backward", _GRADIENT_INSIDE),
    (torch.autograd, "grad", _GRADIENT_INSIDE),
    (torch, "manual_seed", _GENERATOR),
    (torch, "seed", _GENERATOR),
    (torch, "set_rng_state", _GENERATOR),
    (torch.random, "fork_rng", _GENERATOR),
    (torch.cuda, "manual_seed", _GENERATOR),
    (torch.inference_mode, "__enter__", _inference_mode),
    (Tensor, "requires_grad_", _switched_gradient),
    (nn.Module, "__setattr__", _new_parameter),
)
"""(owner, name of a function, why the user's calls of it are refused)."""


@contextmanager
def guards() -> Generator[None]:
    """While a forward is traced, refuse calls that the graph would not hold, naming the call and its line."""
    with ExitStack() as stack:
        for owner, name, why in _REFUSED:
            stack.enter_context(replaced(owner, name, _refusing(getattr(owner, name), name, why)))
        for patch in (_custom_backward, _no_saved_hooks):
            stack.enter_context(patch())
        yield


def _refusing(original: Callable[..., Any], name: str, why: str | Refusal) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        message = f"{name}: {why}" if isinstance(why, str) else why(*args, **kwargs)
        if message is not None and called_by_user():
            raise UntraceableModel(message, calling_line())
        return original(*args, **kwargs)

    return call


@contextmanager
def _custom_backward() -> Generator[None]:
    """Turn each call of a custom autograd.Function into one operator, which keeps its backward: torch.export
    silently drops that. `Function.apply` itself is not replaced, as the user's code may hold it under another
    name (`quantise = Quantise.apply`); all its calls go through the class below it."""
    operators = Operators()

    def call(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        apply: Callable[..., Any] = super(BELOW_FUNCTION, cls).apply
        if cls is CheckpointFunction:  # reentrant checkpointing: when to recompute is Makara's decision
            function, _, *rest = args
            return function(*rest)
        if cls.__module__.startswith(TORCHS_OPERATORS):
            return apply(*args, **kwargs)
        try:
            if cls.__module__.startswith("torch.") or kwargs:
                raise Unheld("it is torch's own" if not kwargs else "arguments are given by name")
            return operators.call(cls, apply, args)
        except Unheld as error:
            raise UntraceableModel(
                f"the backward of {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, would be "
                f"lost: {error}. Write it with differentiable operations, or as an operator "
                "(torch.library.custom_op with register_autograd)",
                calling_line(),
            ) from error

    with replaced(BELOW_FUNCTION, "apply", classmethod(call)):
        yield


@contextmanager
def _no_saved_hooks() -> Generator[None]:
    """Refuse hooks on saved tensors, which may change them. torch's own (checkpoint, save_on_cpu) do not."""
    original = saved_tensors_hooks.__enter__

    def enter(self: saved_tensors_hooks) -> None:
        if not type(self).__module__.startswith("torch.") or type(self) is saved_tensors_hooks:
            raise UntraceableModel(
                "saved_tensors_hooks inside forward would be lost. Leave them out: where activations are "
                "kept or recomputed is Makara's decision",
                calling_line(),
            )
        original(self)

    with replaced(saved_tensors_hooks, "__enter__", enter):
        yield


@contextmanager
def python_randomness() -> Generator[list[str | None]]:
    """Yield a list of the user's lines that draw from Python's or NumPy's generator, complete on exit.

    A trace bakes such numbers in, so every step would use the same.
    """
    found: list[str | None] = []
    python: object = random.random.__self__  # pyright: ignore

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is python:
            caller: FrameType | None = frame
            while caller is not None and _is_quiet(caller.f_code.co_filename):
                caller = caller.f_back
            found.append(None if caller is None else line_of(caller.f_code.co_filename, caller.f_lineno))

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(calling_line())
            return draw(*args, **kwargs)

        return call

    numpy: object = np.random.random.__self__  # pyright: ignore
    earlier = sys.getprofile()
    with ExitStack() as stack:
        for name, draw in list(vars(np.random).items()):
            if getattr(draw, "__self__", None) is numpy:
                stack.enter_context(replaced(np.random, name, noting(draw)))
        stack.callback(sys.setprofile, earlier)
        sys.setprofile(watch)
        yield found


def _is_quiet(filename: str) -> bool:
    return is_library(filename) or filename == random.__file__
