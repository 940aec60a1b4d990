"""Which memory a tensor lies in, how it is read and how often it was written; how pickles make tensors.

The public `data_ptr` is the same for all fake tensors, `Tensor._version` is what autograd itself compares,
all ways of reading pickled tensors end in `torch._utils`, and `imag` of a conjugate is a negative view.
Checked with torch 2.13.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch import _utils as _pickling  # pyright: ignore[reportPrivateUsage]

REBUILD: tuple[ModuleType, str] = (_pickling, "_rebuild_tensor")
"""The function that makes a tensor of a storage: (owner, attribute)."""


def storage_key(tensor: Tensor) -> int:
    """The same number for all views of one memory, fake or real, as long as one of them lives."""
    return number_of(tensor.untyped_storage())


def number_of(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has, fake or real."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def version_of(tensor: Tensor) -> int:
    """How often `tensor` and its views were written in place."""
    return tensor._version


def negative_view(tensor: Tensor) -> Tensor:
    """A view of the same memory whose numbers are the negatives of those in it."""
    return torch._neg_view(tensor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
