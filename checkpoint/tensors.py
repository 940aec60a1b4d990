"""Converts torch tensors to safetensors and back. The only module of this package that imports torch.

Used for the parts of a checkpoint and for the state that one trainer sends to another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import Corrupt
from .safetensors_header import parse_header


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of these tensors, bit for bit, from any device; views and aliases are stored in
    full.

    Raises `ValueError` naming a tensor that is sparse, quantised or of a type that safetensors lacks.
    """
    seen: set[int] = set()
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ValueError(
                f"tensor {name!r}: expected dense values, got {tensor.layout} on {tensor.device}"
            )
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        ready[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    try:
        # None instead of {}: with no tensors and {}, safetensors 0.8 writes an unreadable header.
        return save(ready, metadata=dict(metadata) if metadata else None)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"tensors {sorted(ready)}: {error}") from error


def unpack(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) that `pack` was given. Raises `Corrupt`."""
    header = parse_header(data, "payload")
    try:
        loaded = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise Corrupt(f"payload: not a valid safetensors file: {error}") from error
    return loaded, dict(header.metadata)
