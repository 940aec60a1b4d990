"""Fake tensors as views of storages, and the same views of real memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..torch_private.storages import negative_view, storage_key

Memory = dict[int, torch.UntypedStorage]
"""{`storage_key` of a fake tensor: the real storage that stands for its own}."""


@dataclass(frozen=True, slots=True)
class View:
    """A fake tensor as a view of a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False  # its numbers are the conjugates of those in memory
    is_neg: bool = False


def view_of(fake: Tensor) -> View:
    return View(
        storage_key(fake),
        tuple(fake.shape),
        fake.stride(),
        int(fake.storage_offset()),
        fake.dtype,
        fake.is_conj(),
        fake.is_neg(),
    )


def real_view(memory: Memory, view: View) -> Tensor:
    storage = memory[view.storage]
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)  # "meta", if it has only a shape
    placed: Tensor = empty.set_(storage, view.offset, view.size, view.stride)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _read_as(view, placed)


def store(memory: Memory, views: Sequence[View], results: Sequence[Tensor]) -> None:
    """Take the storages of `results`, laid out as `views` say, except those that `memory` has already."""
    for view, result in zip(views, results, strict=True):
        if view.storage in memory:
            continue
        if result.stride() != view.stride or result.storage_offset() != view.offset:
            needed = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=result.device)
            assert view.offset == 0, "a new storage begins with its tensor"
            result = _read_as(view, needed).copy_(result)
        memory[view.storage] = result.untyped_storage()


def _read_as(view: View, tensor: Tensor) -> Tensor:
    """`tensor`, read as `view` reads its memory: conjugated, negative or as it is."""
    if view.is_conj:
        tensor = tensor.conj()
    return negative_view(tensor) if view.is_neg else tensor
