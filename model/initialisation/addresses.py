"""Addresses for fake tensors, which all lie at 0 for torch.

Libraries compare addresses to find tied weights (`load_model` of safetensors). Here tensors of one storage
lie in one range, those of different storages in ranges that do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ..patching import replaced
from ..torch_private.fake_tensors import FakeTensor
from ..torch_private.storages import number_of

_LARGEST_STORAGE = 1 << 48  # bytes; no machine addresses more


@contextmanager
def addressed() -> Generator[None]:
    """In this context, `data_ptr()` of fake tensors and of their storages tells what shares memory."""
    real_address: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        return number_of(self) * _LARGEST_STORAGE if self.device.type == "meta" else real_address(self)

    def of_tensor(self: Tensor) -> int:
        if self.device.type == "meta" or self.numel() == 0:
            return 0
        return of_storage(self.untyped_storage()) + int(self.storage_offset()) * self.element_size()

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.UntypedStorage, "data_ptr", of_storage))
        stack.enter_context(replaced(FakeTensor, "data_ptr", of_tensor))
        yield
