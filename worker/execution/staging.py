"""Copies between the device and the host memory that gloo uses.

On the CPU both are the same and nothing is copied. On CUDA each thread copies on a stream of its own through
pinned memory, so that transfers overlap the compute stream; events tell when a tensor is complete. The
machines that tests usually run on have no GPU; see docs/benchmarks.md for what was run on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Staged(NamedTuple):
    """A tensor that a stream may still be writing; `ready` is None once it is complete."""

    tensor: Tensor
    ready: Any


class Stager:
    """One helper thread's copies. `mark` and `take` are for the compute thread, the rest for the helper."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's, so that nothing is copied."""
        return not self._cuda

    def mark(self, tensor: Tensor) -> Staged:
        """`tensor` as it will be after the operations issued so far."""
        return Staged(tensor, self.moment())

    def take(self, staged: Staged) -> Tensor:
        """The tensor for operations issued from now on."""
        if staged.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(staged.ready)
            staged.tensor.record_stream(stream)
        return staged.tensor

    def to_host(self, staged: Staged) -> Tensor:
        """A complete, contiguous host tensor; the tensor itself if it is one already."""
        if not self._cuda:
            return staged.tensor.contiguous()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(staged.ready)
            host = self.empty(staged.tensor.shape, staged.tensor.dtype)
            host.copy_(staged.tensor, non_blocking=True)
            staged.tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def to_device(self, host: Tensor) -> Staged:
        """Copy `host` to the device; nothing is copied if it is there."""
        if not self._cuda:
            return Staged(host, None)
        with torch.cuda.stream(self._stream):
            target = torch.empty_like(host, device=self._device)
            target.copy_(host, non_blocking=True)
            return Staged(target, self._stream.record_event())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory to receive into."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._cuda)

    def moment(self) -> Any:
        """The operations that this thread has issued so far; None on the CPU, where they are done."""
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None

    def following(self, moment: Any) -> AbstractContextManager[Any]:
        """Within it, what the helper issues runs after another thread's `moment`."""
        if not self._cuda:
            return nullcontext()
        self._stream.wait_event(moment)
        return torch.cuda.stream(self._stream)

    def adopt(self, tensors: Iterable[Tensor], moment: Any) -> None:
        """Let operations issued from now on use tensors that a helper computed up to `moment`."""
        if not self._cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(moment)
        for tensor in tensors:
            tensor.record_stream(stream)

    def reduce(self, tensor: Tensor, collective: Callable[[Tensor], None]) -> None:
        """Run an in-place collective on a tensor, through host memory if necessary, within `following`."""
        if not self._cuda:
            collective(tensor)
            return
        host = self.empty(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        collective(host)
        tensor.copy_(host, non_blocking=True)
