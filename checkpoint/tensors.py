"""Converts torch tensors to safetensors and back. The only module of this package that imports torch.

Used for the parts of a checkpoint and for the state that one trainer sends to another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from .errors import Corrupt
from .safetensors_header import TensorEntry, build_header, parse_header

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of these tensors, bit for bit, from any device; views and aliases are stored in
    full.

    What lies contiguous on the host is copied once, while `safetensors.torch.save` holds two copies. Raises
    `ValueError` naming a tensor that is sparse, quantised or of a type that safetensors lacks.
    """
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ValueError(
                f"tensor {name!r}: expected dense values, got {tensor.layout} on {tensor.device}"
            )
        if tensor.dtype not in _TYPES:
            raise ValueError(f"tensor {name!r}: safetensors has no type for {tensor.dtype}")
        ready[name] = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    entries = [
        TensorEntry(name, _TYPES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in ready.items()
    ]
    header, placed = build_header(entries, metadata or {})
    return b"".join([header, *(_bytes_of(ready[entry.name]) for entry in placed if entry.num_bytes)])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unpack(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) that `pack` was given. Raises `Corrupt`."""
    header = parse_header(data, "payload")
    try:
        loaded = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise Corrupt(f"payload: not a valid safetensors file: {error}") from error
    return loaded, dict(header.metadata)
