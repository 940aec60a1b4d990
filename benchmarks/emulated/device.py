"""The device: two operators between which a layer takes its time, and one for its weights.

`begin` and `end` enclose a layer's arithmetic. Forwards, `end` returns no sooner than `forward_s` after
`begin`; backwards, where gradients come to `end` first, `begin` returns no sooner than `backward_s` after
`end`. So a layer takes its time whatever the arithmetic inside costs, as on a device that runs beside its
host, and what is outside (the executor, what crosses a section) comes on top, as it does there. Where the
gradients of the weights take a time of their own, `weighed` takes it after that.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

_began = 0.0
"""When the running operation began, by `time.monotonic`. A process has one compute thread."""


@torch.library.custom_op("makara_emulated::begin", mutates_args=())
def begin(x: Tensor, backward_s: float) -> Tensor:
    """A copy of `x`; the device is busy from now on."""
    _start()
    return x.clone()


@torch.library.custom_op("makara_emulated::end", mutates_args=())
def end(x: Tensor, forward_s: float) -> Tensor:
    """A copy of `x`, no sooner than `forward_s` after `begin`."""
    _sleep(forward_s)
    return x.clone()


@torch.library.custom_op("makara_emulated::weighed", mutates_args=())
def weighed(weight: Tensor, weight_s: float) -> Tensor:
    """A copy of `weight`, whose gradient takes `weight_s`."""
    return weight.clone()


@begin.register_fake
def _(x: Tensor, backward_s: float) -> Tensor:
    return torch.empty_like(x)


@end.register_fake
def _(x: Tensor, forward_s: float) -> Tensor:
    return torch.empty_like(x)


@weighed.register_fake
def _(weight: Tensor, weight_s: float) -> Tensor:
    return torch.empty_like(weight)


def _remember(ctx, inputs, output) -> None:
    ctx.backward_s = inputs[1]


def _end_backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    _start()
    return gradient, None


def _begin_backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    _sleep(ctx.backward_s)
    return gradient, None


def _weigh_backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    _start()
    _sleep(ctx.backward_s)
    return gradient, None


begin.register_autograd(_begin_backward, setup_context=_remember)
end.register_autograd(_end_backward)
weighed.register_autograd(_weigh_backward, setup_context=_remember)


def _start() -> None:
    global _began
    _began = time.monotonic()


def _sleep(seconds: float) -> None:
    left = _began + seconds - time.monotonic()
    if left > 0:
        time.sleep(left)
